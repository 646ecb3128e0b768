// The norm maps of both operands of a product.
#pragma once

#include <ATen/core/Tensor.h>

#include <tuple>

#include "block.h"

namespace spamm::cuda {

// Computes the op norm_maps, with its arguments. `zeroed`, if not null, is an int in device memory
// that the same launch sets to 0. There is no launch if both maps are empty.
std::tuple<at::Tensor, at::Tensor> norm_maps(const at::Tensor& a, const at::Tensor& b,
                                             const Block& block, int* zeroed);

}  // namespace spamm::cuda
