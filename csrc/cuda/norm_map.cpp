// norm_map on CUDA: tensors to pointers.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <bit>
#include <limits>

#include "checks.h"
#include "device.h"
#include "norm_map_launch.h"

namespace spamm::cuda {
namespace {

using at::Tensor;

template <class Norm>
void launch(const Tensor& a, int64_t block_rows, int64_t block_columns, const Tensor& norms,
            const OnDevice& device) {
  // The kernel reads along the direction with the shorter stride.
  const bool by_rows = a.size(2) == 1 || a.stride(2) <= a.stride(1) || a.size(1) == 1;
  const int64_t line = by_rows ? 1 : 2, entry = by_rows ? 2 : 1;
  const auto log2_edge = [](int64_t edge) { return std::countr_zero(static_cast<uint64_t>(edge)); };
  kernels::NormMapParams<Norm> p{};
  p.data = a.const_data_ptr();
  p.batch = a.size(0), p.lines = a.size(line), p.length = a.size(entry);
  p.batch_stride = a.stride(0), p.line_stride = a.stride(line), p.entry_stride = a.stride(entry);
  p.log2_block_lines = log2_edge(by_rows ? block_rows : block_columns);
  p.log2_block_length = log2_edge(by_rows ? block_columns : block_rows);
  p.norms = norms.mutable_data_ptr<Norm>();
  p.norm_batch_stride = norms.stride(0);
  p.norm_line_stride = norms.stride(line), p.norm_entry_stride = norms.stride(entry);

  const auto aligned = [&](int64_t size, int64_t stride) {
    return size == 1 || stride * a.element_size() % 16 == 0;
  };
  const bool vector = p.entry_stride == 1 && aligned(p.lines, p.line_stride) &&
                      aligned(p.batch, p.batch_stride) &&
                      reinterpret_cast<uintptr_t>(p.data) % 16 == 0;
  launch_norm_map<Norm>(p, a.scalar_type(), vector, device.stream());
}

Tensor norm_map(const Tensor& a, at::IntArrayRef block) {
  check_operand_dtype(a.scalar_type(), "a");
  check_block_pair(block);
  check_matrices(a);
  const OnDevice device(a);
  auto shape = a.sizes().vec();
  shape[a.dim() - 2] = blocks_of(a.size(-2), block[0]);
  shape[a.dim() - 1] = blocks_of(a.size(-1), block[1]);
  const Tensor norms = at::empty(shape, a.options().dtype(norm_dtype(a.scalar_type())));
  if (norms.numel() == 0) return norms;
  TORCH_CHECK(norms.numel() <= std::numeric_limits<int32_t>::max(),
              "a must have at most 2^31 - 1 blocks; got ", norms.numel(), " for shape ", a.sizes());
  // One batch dimension in place of any number; copies only where no stride describes them.
  const Tensor matrices = a.reshape({-1, a.size(-2), a.size(-1)});
  const Tensor map = norms.view({-1, norms.size(-2), norms.size(-1)});
  if (a.scalar_type() == at::kDouble) {
    launch<double>(matrices, block[0], block[1], map, device);
  } else {
    launch<float>(matrices, block[0], block[1], map, device);
  }
  return norms;
}

}  // namespace

TORCH_LIBRARY_IMPL(spamm_torch, CUDA, m) { m.impl("norm_map", &norm_map); }

}  // namespace spamm::cuda
