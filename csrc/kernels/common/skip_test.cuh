// The skip test. Every kernel decides through these functions, so that all of them skip the same
// block products, bit for bit.
#pragma once

#include <cuda_runtime.h>

namespace spamm::kernels {

// One rounding, never contracted with what follows.
__device__ inline float norm_product(float a, float b) { return __fmul_rn(a, b); }
__device__ inline double norm_product(double a, double b) { return __dmul_rn(a, b); }

// Negated, so that a NaN on either side keeps the product.
template <class Norm>
__device__ bool is_valid(Norm product, Norm tau) {
  return !(product < tau);
}

}  // namespace spamm::kernels
