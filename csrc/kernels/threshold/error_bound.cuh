// The error bound of skipping, sqrt(sum over (i, j) of (sum over skipped k of norm_a * norm_b)^2).
//
// Sums are double, rounded upwards, in a fixed order. kNormSlack and at_most cover norms' rounding.
#pragma once

#include <cstdint>

#include "kernels/threshold/norm_products.cuh"
#include "norm_slack.h"

namespace spamm::kernels {

// A sum of squares of non-negative numbers, rounded upwards. For float32 norms: the square of a
// product of two always fits a double.
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

// The smallest number of the norms' type that is at least x.
template <class Norm>
__device__ Norm round_up(double x) {
  if constexpr (sizeof(Norm) == 4) {
    return __double2float_ru(x);
  } else {
    return x;
  }
}

// Computes the bound of a threshold. Each thread block sums one patch of C. `partial` has room for
// gridDim.x sums. `arrived` is zero.
template <class Norm>
__global__ void __launch_bounds__(kProductThreads)
    error_bound(const NormMaps<Norm> maps, const Tau<Norm> tau, SumOfSquares<Norm>* partial,
                unsigned* arrived, Norm* bound) {
  __shared__ double patch_lost[kPatchRows][32];
  const Patch patch(maps, blockIdx.x);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  const Norm threshold = tau.value();
  double lost[kPatchRows] = {};
  for_each_product(maps, patch, warp, maps.kb, kProductWarps,
                   [&](int r, Norm a, Norm b, Norm skip_norm_b) {
                     if (!is_valid(norm_product(a, skip_norm_b), threshold)) {
                       lost[r] = __dadd_ru(lost[r], __dmul_ru(at_most(a), at_most(b)));
                     }
                   });
  for (int turn = 0; turn < kProductWarps; ++turn) {
    if (warp == turn) {
#pragma unroll
      for (int r = 0; r < kPatchRows; ++r) {
        double& sum = patch_lost[r][lane];
        sum = turn == 0 ? lost[r] : __dadd_ru(sum, lost[r]);
      }
    }
    __syncthreads();
  }
  if (warp == 0) {
    SumOfSquares<Norm> squares{};
    for (int r = 0; r < kPatchRows; ++r) squares.add(patch_lost[r][lane]);
    squares = sum_warp(squares);
    if (lane == 0) partial[blockIdx.x] = squares;
  }
  if (!is_last_block(arrived) || warp != 0) return;

  const double root = sum_array(partial, gridDim.x).root();
  if (lane == 0) *bound = round_up<Norm>(__dmul_ru(root, 1 + kNormSlack<Norm>));
}

// The number of valid k. counts: (batch, mb, nb). Each thread block counts one patch.
template <class Norm>
__global__ void __launch_bounds__(kProductThreads)
    valid_counts(const NormMaps<Norm> maps, const Tau<Norm> threshold, int32_t* counts) {
  __shared__ int32_t partial[kProductWarps][kPatchRows][32];
  const Patch patch(maps, blockIdx.x);
  const Norm tau = threshold.value();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int32_t valid[kPatchRows] = {};
  for_each_product(maps, patch, warp, maps.kb, kProductWarps, [&](int r, Norm a, Norm b, Norm) {
    valid[r] += is_valid(norm_product(a, b), tau);
  });
  for (int r = 0; r < kPatchRows; ++r) partial[warp][r][lane] = valid[r];
  __syncthreads();
  const int row = patch.row + warp;
  if (warp >= kPatchRows || row >= maps.mb || patch.column >= maps.nb) return;
  int32_t total = 0;
  for (int w = 0; w < kProductWarps; ++w) total += partial[w][warp][lane];
  counts[(patch.batch * maps.mb + row) * maps.nb + patch.column] = total;
}

}  // namespace spamm::kernels
