// Starts the kernels beside a block-sparse product.
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>

#include "cuda/sparse/blocks.h"
#include "kernels/common/launch.cuh"
#include "kernels/sparse/blocks.cuh"
#include "kernels/sparse/tiles.cuh"

namespace spamm::cuda {
namespace {

// A row of thread blocks for each block row.
template <class... Params>
void launch(void (*kernel)(Params...), int rows, int together, int threads, const OnDevice& device,
            const std::type_identity_t<Params>&... params) {
  C10_CUDA_CHECK(kernels::launch(kernel, dim3(rows, together), threads, 0,
                                 /*overlap_previous=*/false, device.stream(), params...));
}

constexpr int kTogether = 16;  // blocks of a row that are copied at a time

kernels::BlockMemory memory_of(const BlockTensor& x, int64_t edge) {
  return {.data = static_cast<uint8_t*>(const_cast<void*>(x.values.const_data_ptr())),
          .cells = x.cells.defined() ? x.cells.const_data_ptr<int>() : nullptr,
          .edge = static_cast<int>(edge),
          .entry_bytes = static_cast<int>(x.values.element_size())};
}

}  // namespace

kernels::Pattern pattern_of(const at::Tensor& crow, const at::Tensor& col) {
  const auto indices = [](const at::Tensor& x) {
    return kernels::Indices{x.const_data_ptr(), x.scalar_type() == at::kLong};
  };
  return {indices(crow), indices(col), static_cast<int>(crow.numel() - 1)};
}

void find_tiles(const kernels::ProductLists& lists, const kernels::TileConfig& tile, int granule,
                const OnDevice& device) {
  launch(kernels::find_tiles, lists.c.rows, 1, kernels::kFindTilesThreads, device, lists,
         tile.rows / granule, tile.columns / granule);
}

at::Tensor find_cells(const kernels::Pattern& pattern, int64_t stored, const OnDevice& device) {
  const at::Tensor cells =
      at::empty({stored}, at::TensorOptions().dtype(at::kInt).device(at::kCUDA));
  launch(kernels::find_cells, pattern.rows, 1, kernels::kBlockThreads, device, pattern,
         cells.mutable_data_ptr<int>());
  return cells;
}

void copy_blocks(const kernels::Pattern& pattern, const BlockTensor& from, const BlockTensor& to,
                 int64_t edge, const kernels::Pattern* source, const OnDevice& device,
                 bool upper_only) {
  const kernels::BlockCopy params{pattern,
                                  memory_of(from, edge),
                                  memory_of(to, edge),
                                  source != nullptr,
                                  source == nullptr ? kernels::Pattern{} : *source,
                                  upper_only};
  launch(kernels::copy_blocks, pattern.rows, kTogether, kernels::kBlockThreads, device, params);
}

void mirror_blocks(const kernels::Pattern& pattern, const at::Tensor& values,
                   const at::Tensor& norms, const OnDevice& device) {
  const auto run = [&]<class Element>(Element) {
    using Norm = kernels::NormOf<Element>;
    launch(kernels::mirror_blocks<Element>, pattern.rows, kTogether,
           kernels::kSquareThreads<Element>, device, pattern,
           static_cast<Element*>(values.mutable_data_ptr()), static_cast<int>(values.size(1)),
           norms.defined() ? norms.mutable_data_ptr<Norm>() : nullptr);
  };
  switch (values.scalar_type()) {
    case at::kHalf:
      return run(__half{});
    case at::kBFloat16:
      return run(__nv_bfloat16{});
    case at::kFloat:
      return run(float{});
    default:
      return run(double{});
  }
}

}  // namespace spamm::cuda
