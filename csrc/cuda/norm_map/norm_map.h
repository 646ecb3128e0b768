// The norm maps of the operands of a product.
#pragma once

#include <ATen/core/Tensor.h>

#include <tuple>

#include "block.h"

namespace spamm::cuda {

// Computes the op norm_maps, with its arguments. `zeroed`, if not null, is an int in device memory
// that the same launch sets to 0. There is no launch if both maps are empty.
std::tuple<at::Tensor, at::Tensor> norm_maps(const at::Tensor& a, const at::Tensor& b,
                                             const Block& block, int* zeroed);

// Computes the op norm_map with block (rows, columns). `zeroed`: as above.
at::Tensor norm_map(const at::Tensor& a, int64_t rows, int64_t columns, int* zeroed);

// The same into `map`, which is contiguous and has the map's shape and dtype.
void norm_map_into(const at::Tensor& a, int64_t rows, int64_t columns, const at::Tensor& map);

}  // namespace spamm::cuda
