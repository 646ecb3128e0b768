// The product on CUDA, shared by the ops multiply and spamm.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "block.h"
#include "cuda/device.h"
#include "cuda/heuristics.h"
#include "cuda/multiply/split.h"

namespace spamm::cuda {

// A matrix as a batch of one.
inline at::Tensor as_batch(const at::Tensor& x) { return x.dim() == 3 ? x : x.unsqueeze(0); }

// The kernel for the product of `a` and `b`. `device` is theirs.
Kernel kernel_for(const at::Tensor& a, const at::Tensor& b, const Block& block,
                  const OnDevice& device);

// Results of earlier stages that product() reuses.
struct Prepared {
  // Result of kernel_for(). Stored, because PyTorch's TF32 setting may change between two calls.
  std::optional<Kernel> kernel;
  // The split parts of the operands, split_parts_of(kernel) of each.
  const SplitOperands* split_parts = nullptr;
  // A TileCounter that is zero when the previous kernel on the stream has ended.
  int* next_tile = nullptr;
};

// Computes the op multiply. Its arguments have passed check_product().
at::Tensor product(const at::Tensor& a, const at::Tensor& b, const Prepared& prepared,
                   const at::Tensor& norm_a, const at::Tensor& norm_b, const at::Tensor& tau,
                   const Block& block, const std::optional<at::Tensor>& input,
                   const at::Scalar& beta, const at::Scalar& alpha);

}  // namespace spamm::cuda
