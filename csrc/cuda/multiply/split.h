// float32 operands in split parts, for products on Hopper's tensor cores.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>

#include "checks.h"
#include "cuda/multiply/launch.h"
#include "cuda/norm_map/layout.h"

namespace spamm::cuda {

// An operand's split parts. The constructor only allocates; launch_split() computes.
class SplitTensor {
 public:
  // No dimension of `x` (batch, rows, columns) is 0. `k_dim` is its dimension along K. If `norms`
  // is defined, the split writes x's map in blocks of 64 to it, with the same order of dimensions.
  // `split_parts` is 1 or 2.
  SplitTensor(const at::Tensor& x, int64_t k_dim, int split_parts, const at::Tensor& norms)
      : has_batch_(x.size(0) > 1 && x.stride(0) != 0),
        source_(has_batch_ ? x : x.narrow(0, 0, 1)),
        norms_(norms) {
    const int64_t extent_dim = 3 - k_dim;
    const auto blocks_along = [&](int64_t dim) {
      return static_cast<int>(blocks_of(x.size(dim), kernels::kSplitBlock));
    };
    const int extent = blocks_along(extent_dim), depth = blocks_along(k_dim);
    const int64_t blocks = source_.size(0) * extent * depth;
    memory_ = allocate(source_, blocks * kernels::split_bytes_per_block(split_parts));
    auto* const data = static_cast<kernels::SplitBlock<1>*>(memory_.mutable_data_ptr());
    auto* const headers = reinterpret_cast<kernels::SplitHeader*>(data + blocks * split_parts);
    auto* const profiles = reinterpret_cast<kernels::SplitProfile*>(headers + blocks);
    params_.split = {data, headers, profiles, extent, depth};
    params_.lines_along_k = lines_are_rows(source_) == (k_dim == 2);
    params_.matrix =
        norm_map_params<float>(source_, kernels::kSplitBlock, kernels::kSplitBlock,
                               has_batch_ || !norms.defined() ? norms : norms.narrow(0, 0, 1));
    strides_[0] = x.stride(extent_dim), strides_[1] = x.stride(k_dim);
  }

  const kernels::SplitParams& params() const { return params_; }
  kernels::SplitSource source() const { return {params_.split, strides_[0], strides_[1]}; }
  kernels::Operand operand() const { return {nullptr, has_batch_, 0, params_.lines_along_k}; }

 private:
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

// Both operands of a product, and the largest terms of its blocks.
struct SplitOperands {
  SplitTensor a, b;
  at::Tensor terms;

  SplitOperands(const at::Tensor& batch_a, const at::Tensor& batch_b, int split_parts,
                const at::Tensor& norms_a, const at::Tensor& norms_b, cudaStream_t stream)
      : a(batch_a, 2, split_parts, norms_a), b(batch_b, 1, split_parts, norms_b) {
    const kernels::SplitParams params[] = {a.params(), b.params()};
    C10_CUDA_CHECK(launch_split(params, 2, split_parts, stream));
    const int64_t batch = std::max(batch_a.size(0), batch_b.size(0));
    const kernels::SplitOperand &split_a = params[0].split, &split_b = params[1].split;
    terms = at::empty({batch, split_a.extent, split_b.extent}, batch_a.options().dtype(at::kShort));
    C10_CUDA_CHECK(
        launch_largest_terms({split_a, split_b, a.operand().batch_stride != 0,
                              b.operand().batch_stride != 0, terms.mutable_data_ptr<int16_t>()},
                             batch, stream));
  }
};

}  // namespace spamm::cuda
