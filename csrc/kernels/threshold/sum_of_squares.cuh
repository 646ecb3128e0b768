// Sums of squares of non-negative numbers, rounded upwards.
#pragma once

#include <cstdint>

namespace spamm::kernels {

// For float32 norms: the square of a product of two always fits a double.
template <class Norm>
struct SumOfSquares {
  double sum;
  __device__ void add(double x) { sum = __fma_ru(x, x, sum); }
  __device__ void add(const SumOfSquares& other) { sum = __dadd_ru(sum, other.sum); }
  // The sum of the lane whose number is this lane's XOR `distance`.
  __device__ SumOfSquares of_lane(int distance) const {
    return {__shfl_xor_sync(~0u, sum, distance)};
  }
  __device__ double root() const { return __dsqrt_ru(sum); }
};

// For float64 norms the squares may not fit a double. So small and large numbers are scaled and
// have sums of their own (Blue, "A portable Fortran program to find the Euclidean norm of a
// vector", 1978).
template <>
struct SumOfSquares<double> {
  static constexpr double kSmall = 0x1p-400, kLarge = 0x1p400, kUp = 0x1p600, kDown = 0x1p-600;
  double small, middle, large;

  __device__ void add(double x) {
    if (x < kSmall) {
      small = __fma_ru(x * kUp, x * kUp, small);
    } else if (x <= kLarge) {
      middle = __fma_ru(x, x, middle);
    } else {
      large = __fma_ru(x * kDown, x * kDown, large);
    }
  }
  __device__ void add(const SumOfSquares& other) {
    small = __dadd_ru(small, other.small);
    middle = __dadd_ru(middle, other.middle);
    large = __dadd_ru(large, other.large);
  }
  __device__ SumOfSquares of_lane(int distance) const {
    return {__shfl_xor_sync(~0u, small, distance), __shfl_xor_sync(~0u, middle, distance),
            __shfl_xor_sync(~0u, large, distance)};
  }
  __device__ double root() const {
    if (large != 0) {
      const double rest = __dmul_ru(__dmul_ru(__dadd_ru(middle, small), kDown), kDown);
      return __dmul_ru(__dsqrt_ru(__dadd_ru(large, rest)), kUp);
    }
    if (middle != 0) {
      return __dsqrt_ru(__dadd_ru(middle, __dmul_ru(__dmul_ru(small, kDown), kDown)));
    }
    return __dmul_ru(__dsqrt_ru(small), kDown);
  }
};

// Sum over a warp in a fixed order. All lanes get the result.
template <class Norm>
__device__ SumOfSquares<Norm> sum_warp(SumOfSquares<Norm> own) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) own.add(own.of_lane(distance));
  return own;
}

// Sum of an array, computed by one warp.
template <class Norm>
__device__ SumOfSquares<Norm> sum_array(const SumOfSquares<Norm>* sums, int64_t count) {
  SumOfSquares<Norm> own{};
  for (int64_t i = threadIdx.x % 32; i < count; i += 32) own.add(sums[i]);
  return sum_warp(own);
}

}  // namespace spamm::kernels
