// float32 operands in split parts, for products on Hopper's tensor cores.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>

#include <algorithm>
#include <cstddef>

#include "block.h"
#include "checks.h"
#include "cuda/multiply/launch.h"
#include "cuda/norm_map/layout.h"
#include "cuda/operand.h"

namespace spamm::cuda {

// The granules along an edge of a split block, for a product in these blocks.
inline int granules_of(const Block& block) {
  return std::min({block.m, block.k, block.n}) < kernels::kSplitBlock ? 2 : 1;
}

// An operand's split parts. The constructor only allocates; launch_split() computes.
class SplitTensor {
 public:
  // No dimension of `x` (batch, rows, columns) is 0. `k_dim` is its dimension along K. If `norms`
  // is defined, the split writes x's map in blocks of 64 to it, with the same order of dimensions.
  // `split_parts` is 1 or 2, and so is `granules`, along each edge of a block.
  SplitTensor(const at::Tensor& x, int64_t k_dim, int split_parts, int granules,
              const at::Tensor& norms)
      : has_batch_(x.size(0) > 1 && x.stride(0) != 0),
        source_(compact(has_batch_ ? x : x.narrow(0, 0, 1))),
        norms_(norms) {
    const int64_t extent_dim = 3 - k_dim;
    const auto blocks_along = [&](int64_t dim) {
      return static_cast<int>(blocks_of(x.size(dim), kernels::kSplitBlock));
    };
    const int extent = blocks_along(extent_dim), depth = blocks_along(k_dim);
    const int64_t blocks = source_.size(0) * extent * depth;
    const int64_t block_bytes = split_parts * sizeof(kernels::SplitBlock<1>);
    const int64_t header_bytes = kernels::split_header_bytes(granules);
    const int64_t profile_bytes = kernels::split_profile_bytes(granules);
    memory_ = allocate(source_, blocks * (block_bytes + header_bytes + profile_bytes));
    auto* const data = static_cast<std::byte*>(memory_.mutable_data_ptr());
    std::byte* const headers = data + blocks * block_bytes;
    params_.split = {data, headers, headers + blocks * header_bytes, extent, depth};
    params_.lines_along_k = lines_are_rows(source_) == (k_dim == 2);
    params_.matrix =
        norm_map_params<float>(source_, kernels::kSplitBlock, kernels::kSplitBlock,
                               has_batch_ || !norms.defined() ? norms : norms.narrow(0, 0, 1));
    strides_[0] = step(source_, extent_dim), strides_[1] = step(source_, k_dim);
  }

  const kernels::SplitParams& params() const { return params_; }
  at::TensorOptions options() const { return source_.options(); }
  kernels::SplitSource source() const { return {params_.split, strides_[0], strides_[1]}; }
  kernels::Operand operand() const { return {nullptr, has_batch_, 0, params_.lines_along_k}; }

 private:
  // A copy if strides are so long that kernels would multiply in another way: bits must not depend
  // on where in memory an operand lies.
  static at::Tensor compact(const at::Tensor& x) {
    const int64_t longest = std::max(step(x, 1), step(x, 2));
    return longest <= kernels::kLongestSplitStride ? x : x.contiguous();
  }

  static at::Tensor allocate(const at::Tensor& x, int64_t bytes) {
    try {
      return at::empty({bytes}, x.options().dtype(at::kByte));
    } catch (const c10::OutOfMemoryError&) {
      TORCH_CHECK_WITH(OutOfMemoryError, false, "float32 products on tensor cores need ", bytes,
                       " bytes of GPU memory for the split parts of an operand of shape ",
                       x.sizes());
    }
  }

  bool has_batch_;
  at::Tensor source_;  // kernels read blocks here that split parts cannot represent
  at::Tensor norms_, memory_;
  int64_t strides_[2];
  kernels::SplitParams params_{};
};

// Both operands of a product in blocks of `block`.
struct SplitOperands {
  SplitTensor a, b;

  SplitOperands(const at::Tensor& batch_a, const at::Tensor& batch_b, int split_parts,
                const Block& block, const at::Tensor& norms_a, const at::Tensor& norms_b,
                cudaStream_t stream)
      : a(batch_a, 2, split_parts, granules_of(block), norms_a),
        b(batch_b, 1, split_parts, granules_of(block), norms_b) {
    const kernels::SplitParams params[] = {a.params(), b.params()};
    C10_CUDA_CHECK(launch_split(params, 2, split_parts, granules_of(block), stream));
  }

  // Room for a number for each granule of whole blocks of a batch of products.
  at::Tensor empty_terms(int64_t batch, const Block& block) const {
    const int granules = granules_of(block);
    const int64_t rows = a.params().split.extent, columns = b.params().split.extent;
    return at::empty({batch, rows * granules, columns * granules}, a.options().dtype(at::kShort));
  }

  // The same for the cells of a block-sparse C.
  at::Tensor empty_terms_of(const at::Tensor& c, const Block& block) const {
    const int granules = granules_of(block), edge = kernels::kSplitBlock / granules;
    return at::empty({c.numel() / (edge * edge)}, a.options().dtype(at::kShort));
  }
};

}  // namespace spamm::cuda
