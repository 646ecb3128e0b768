// The skip test. Every kernel calls these functions, so all kernels skip the same block products.
#pragma once

#include <cuda_runtime.h>

#include <cmath>

namespace spamm::kernels {

// Rounded once: the intrinsics keep the compiler from fusing the product into an FMA.
__device__ inline float norm_product(float a, float b) { return __fmul_rn(a, b); }
__device__ inline double norm_product(double a, double b) { return __dmul_rn(a, b); }

// Written with a negation, so that a NaN on either side keeps the product.
template <class Norm>
__device__ bool is_valid(Norm product, Norm tau) {
  return !(product < tau);
}

// For im2col blocks. A block of zeros (padding) only matters where it meets an infinite or NaN
// weight, so it is skipped for any finite norm of the weight, even if tau is 0.
template <class Norm>
__device__ bool is_valid_im2col(Norm norm_weight, Norm skip_norm, Norm tau) {
  return is_valid(norm_product(norm_weight, skip_norm), skip_norm == 0 ? Norm{INFINITY} : tau);
}

// The factor from the norm of a pixel block to its skip norm: sqrt(volume / inside), for a block of
// `volume` pixels of which `inside` lie in the output. Rounded as in conv/shape.h.
__device__ inline float partial_block_scale(float volume, float inside) {
  return __fsqrt_rn(__fdiv_rn(volume, inside));
}
__device__ inline double partial_block_scale(double volume, double inside) {
  return __dsqrt_rn(__ddiv_rn(volume, inside));
}

}  // namespace spamm::kernels
