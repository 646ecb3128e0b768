// The skip test. Every kernel decides through these functions, so that all of them skip the same
// block products, bit for bit.
#pragma once

#include <cuda_runtime.h>

#include <cmath>

namespace spamm::kernels {

// One rounding, never contracted with what follows.
__device__ inline float norm_product(float a, float b) { return __fmul_rn(a, b); }
__device__ inline double norm_product(double a, double b) { return __dmul_rn(a, b); }

// Negated, so that a NaN on either side keeps the product.
template <class Norm>
__device__ bool is_valid(Norm product, Norm tau) {
  return !(product < tau);
}

// For im2col blocks. Those of zeros add nothing unless infinities or NaNs meet them, whatever tau
// says.
template <class Norm>
__device__ bool is_valid_im2col(Norm norm_weight, Norm skip_norm, Norm tau) {
  return is_valid(norm_product(norm_weight, skip_norm), skip_norm == 0 ? Norm{INFINITY} : tau);
}

// What makes the norm of a pixel block of `volume` pixels, of which `inside` are in the output, its
// skip norm: sqrt(volume / inside), each step rounded once (as in conv/partial_blocks.h).
__device__ inline float partial_block_scale(float volume, float inside) {
  return __fsqrt_rn(__fdiv_rn(volume, inside));
}
__device__ inline double partial_block_scale(double volume, double inside) {
  return __dsqrt_rn(__ddiv_rn(volume, inside));
}

}  // namespace spamm::kernels
