// The product on CUDA, as its ops share it.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "checks.h"
#include "cuda/device.h"
#include "cuda/heuristics.h"
#include "cuda/multiply/split.h"

namespace spamm::cuda {

// A matrix as a batch of one.
inline at::Tensor as_batch(const at::Tensor& x) { return x.dim() == 3 ? x : x.unsqueeze(0); }

// The kernel for the product of `a` and `b`, whose device is the current one.
Kernel kernel_for(const at::Tensor& a, const at::Tensor& b, const Block& block,
                  const OnDevice& device);

// What earlier stages have left for a product.
struct Prepared {
  std::optional<Kernel> kernel;  // that kernel_for() chose: its answer changes with torch's setting
  const SplitOperands* split_parts =
      nullptr;               // of the very operands, split_parts_of(kernel) of each
  int* next_tile = nullptr;  // a TileCounter's that is zero once the kernel before is over
};

// What multiply computes; arguments as there.
at::Tensor product(const at::Tensor& a, const at::Tensor& b, const Prepared& prepared,
                   const at::Tensor& norm_a, const at::Tensor& norm_b, const at::Tensor& tau,
                   at::IntArrayRef block, const std::optional<at::Tensor>& input,
                   const at::Scalar& beta, const at::Scalar& alpha);

}  // namespace spamm::cuda
