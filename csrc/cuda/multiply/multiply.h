// The launch of a product on CUDA, shared by ops of products, and float32 operands in split parts.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDACachingAllocator.h>

#include <algorithm>
#include <cstddef>

#include "block.h"
#include "cuda/device.h"
#include "cuda/heuristics.h"
#include "cuda/multiply/launch.h"
#include "cuda/norm_map/norm_map.h"
#include "cuda/operand.h"
#include "kernels/multiply/params.h"

namespace spamm::cuda {

// ---- Split parts -------------------------------------------------------------------------------

// The granules along an edge of a split block, for a product in these blocks.
inline int granules_of(const Block& block) {
  return std::min({block.m, block.k, block.n}) < kernels::kSplitBlock ? 2 : 1;
}

// An operand's split parts. The constructor only allocates; launch_split() computes.
class SplitTensor {
 public:
  // No dimension of `x`, a matrix or a batch, is 0. `k_dim` is its dimension along K, of (batch,
  // rows, columns). `split_parts` is 1 or 2, and so is `granules`, along each edge of a block. The
  // split writes x's map, in blocks of a granule, to `norms`.
  SplitTensor(const at::Tensor& x, int64_t k_dim, int split_parts, int granules,
              const MapMemory& norms)
      : source_(compact(x)) {
    const Matrices batch(source_);
    has_batch_ = step(batch, 0) != 0;
    const Matrices source = has_batch_ ? batch : batch.first();
    const int64_t extent_dim = 3 - k_dim;
    const auto blocks_along = [&](int64_t dim) {
      return static_cast<int>(blocks_of(source.size(dim), kernels::kSplitBlock));
    };
    const int extent = blocks_along(extent_dim), depth = blocks_along(k_dim);
    const int64_t blocks = source.size(0) * extent * depth;
    const int64_t block_bytes = split_parts * sizeof(kernels::SplitBlock<1>);
    const int64_t header_bytes =
        granules == 1 ? sizeof(kernels::SplitHeaderOf<1>) : sizeof(kernels::SplitHeaderOf<2>);
    const int64_t profile_bytes =
        granules == 1 ? sizeof(kernels::SplitProfile<1>) : sizeof(kernels::SplitProfile<2>);
    memory_ = allocate(blocks * (block_bytes + header_bytes + profile_bytes));
    auto* const data = static_cast<std::byte*>(memory_.get());
    std::byte* const headers = data + blocks * block_bytes;
    params_.split = {data, headers, headers + blocks * header_bytes, extent, depth};
    params_.turned = !lines_are_rows(source);
    params_.lines_along_k = params_.turned == (k_dim == 1);
    const int64_t granule = kernels::kSplitBlock / granules;
    params_.matrix = norm_map_params<float>(source, granule, granule, norms);
    strides_[0] = step(source, extent_dim), strides_[1] = step(source, k_dim);
  }

  // Takes those of the same matrix as the other operand, whose blocks have the same numbers.
  void take_parts_of(const SplitTensor& other) {
    params_.split.blocks = other.params_.split.blocks;
  }

  const kernels::SplitParams& params() const { return params_; }
  kernels::SplitSource source() const { return {params_.split, strides_[0], strides_[1]}; }
  kernels::Operand operand() const { return {nullptr, has_batch_, 0, false}; }

 private:
  // A copy if strides are so long that kernels would multiply in another way: bits must not depend
  // on where in memory an operand lies.
  static at::Tensor compact(const at::Tensor& x) {
    const int64_t longest = std::max(step(x, 1), step(x, 2));
    if (longest <= kernels::kLongestSplitStride) return x;
    return (step(x, 0) == 0 && x.dim() == 3 ? x.narrow(0, 0, 1) : x).contiguous();
  }

  c10::DataPtr allocate(size_t bytes) const {
    try {
      return c10::cuda::CUDACachingAllocator::get()->allocate(bytes);
    } catch (const c10::OutOfMemoryError&) {
      TORCH_CHECK_WITH(OutOfMemoryError, false, "float32 products on tensor cores need ", bytes,
                       " bytes of GPU memory for the split parts of an operand of shape ",
                       as_batch(source_).sizes());
    }
  }

  at::Tensor source_;
  bool has_batch_;
  c10::DataPtr memory_;
  kernels::SplitParams params_{};
  int64_t strides_[2];
};

// Tells whether split parts of one serve both: one matrix of contiguous rows, blocks in a column.
inline bool is_split_once(const at::Tensor& a, const at::Tensor& b) {
  return a.dim() == 2 && b.dim() == 2 && a.const_data_ptr() == b.const_data_ptr() &&
         a.sizes() == b.sizes() && a.strides() == b.strides() && a.size(0) > 1 && 1 < a.size(1) &&
         a.size(1) <= kernels::kSplitBlock && a.stride(1) == 1 && a.stride(0) >= a.size(1) &&
         a.stride(0) <= kernels::kLongestSplitStride;
}

// Both operands of a product in blocks of `block`.
struct SplitOperands {
  SplitTensor a, b;

  // `zeroed`, if not null, is an int in device memory that the launch sets to 0.
  SplitOperands(const at::Tensor& source_a, const at::Tensor& source_b, int split_parts,
                const Block& block, const MapMemory& norms_a, const MapMemory& norms_b, int* zeroed,
                cudaStream_t stream)
      : a(source_a, 2, split_parts, granules_of(block), norms_a),
        b(source_b, 1, split_parts, granules_of(block), norms_b) {
    if (granules_of(block) == 1 && norms_b.norms == nullptr && is_split_once(source_a, source_b))
      b.take_parts_of(a);
    kernels::SplitParams params[] = {a.params(), b.params()};
    params[0].zeroed = zeroed;
    C10_CUDA_CHECK(launch_split(params, split_parts, granules_of(block), stream));
  }
};

// The facts of a device that heuristics.h asks for.
inline Chip chip_of(const OnDevice& device) {
  return {.hopper = has_hopper_kernels(device.properties()),
          .multiprocessors = device.multiprocessors(),
          .forced_tile = forced_tile(),
          .forced_segments = forced_segments()};
}

// The sizes of a whole product.
inline ProductSize size_of_product(const at::Tensor& a, const at::Tensor& b) {
  const auto matrices = [](const at::Tensor& x) {
    return x.dim() == 3 && x.stride(0) != 0 ? x.size(0) : 1;
  };
  return {.batch_a = matrices(a),
          .batch_b = matrices(b),
          .batch = a.dim() == 3 ? a.size(0) : 1,
          .m = a.size(-2),
          .n = b.size(-1),
          .k = a.size(-1)};
}

// C = alpha * (A B over valid blocks) + beta * input. Tensors are matrices or batches of them that
// have passed check_product(), and outlive the launch.
struct Product {
  const at::Tensor &a, &b;
  // Its rows are contiguous and do not overlap, and its address is a multiple of 16 bytes
  // (is_writable()). It shares no memory with the others and is not empty.
  const at::Tensor& c;
  Block block;
  const void *map_a = nullptr, *map_b = nullptr;  // contiguous norm maps
  Threshold tau = {};
  const at::Tensor* input = nullptr;  // null: nothing is added
  at::Scalar beta = 1, alpha = 1;
  bool upper_only = false;  // what lies below the diagonal may stay as it is
  // Rows of B from `first_own_row` on that lie here and not in `b`. The kernel must be one of
  // reads_own_rows(), and the rows must pass reads_in_place().
  at::Tensor own_rows = {};
  int64_t first_own_row = 0;
  // The split parts of the operands, split_parts_of(kernel) of each. Null: they are made here.
  const SplitOperands* split_parts = nullptr;
  // Device memory of 1 + Choice::meetings ints, allocated on the current stream, so that no launch
  // on another stream or in another graph can use it at the same time. Null: it is allocated here.
  // The first one may be zero when the previous kernel on the stream has ended.
  int* counters = nullptr;
  bool counter_is_zero = false;
  // A block-sparse product of matrices as in kernels/multiply/params.h. Norm maps are not read.
  const kernels::ProductLists* lists = nullptr;
};

// Tells whether `rows` of B, from `first` on, can be read where they are, beside others in `b`.
bool reads_in_place(Kernel kernel, const at::Tensor& rows, int64_t first, const at::Tensor& b);

void launch_product(const Product& product, const Choice& choice, const OnDevice& device);

}  // namespace spamm::cuda
