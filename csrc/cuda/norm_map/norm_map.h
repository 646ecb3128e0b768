// The norm maps of both operands, for those who launch what follows.
#pragma once

#include <ATen/core/Tensor.h>

#include <tuple>

namespace spamm::cuda {

// What the op norm_maps computes; arguments as there. `zeroed`, where it is not null, is an int in
// device memory that the same launch sets to 0; there is a launch where either map has blocks.
std::tuple<at::Tensor, at::Tensor> norm_maps(const at::Tensor& a, const at::Tensor& b,
                                             at::IntArrayRef block, int* zeroed);

}  // namespace spamm::cuda
