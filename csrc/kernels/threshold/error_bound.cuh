// The error bound of skipping, sqrt(sum over (i, j) of (sum over skipped k of norm_a * norm_b)^2),
// and the search for the largest tau whose bound is within a limit.
//
// All sums are double, rounded upwards, in a fixed order. kNormSlack covers the rounding of the
// norms themselves. The bound grows with tau, so the search fixes the bits of tau from the top. A
// sweep fixes three bits: it computes the bounds of seven thresholds at once.
#pragma once

#include <cstdint>

#include "kernels/threshold/norm_products.cuh"
#include "norm_slack.h"

namespace spamm::kernels {

// Sum of squares of non-negative numbers, rounded upwards. For float32 norms: the square of a
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

// The smallest number of the norms' type that is at least x.
template <class Norm>
__device__ Norm round_up(double x) {
  if constexpr (sizeof(Norm) == 4) {
    return __double2float_ru(x);
  } else {
    return x;
  }
}

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

// A sweep that computes the bound of one threshold.
template <class Norm>
struct BoundOfTau {
  static constexpr int kThresholds = 1;
  Tau<Norm> tau;
  Norm* bound;

  __device__ Norm threshold(int) const { return tau.value(); }
  __device__ void finish(const Norm (&bounds)[kThresholds]) const { *bound = bounds[0]; }
};

// The state of the search from sweep to sweep.
template <class Norm>
struct ErrorSearch {
  double limit;                     // NaN: only tau = 0 is allowed
  typename Bits<Norm>::Type found;  // the largest tau so far whose bound is within the limit
  unsigned arrived;
};

// A sweep that fixes three bits of tau: those from bit `shift` on.
template <class Norm>
struct SearchStep {
  static constexpr int kThresholds = 7;
  ErrorSearch<Norm>* search;
  int shift;
  Norm* tau;

  __device__ typename Bits<Norm>::Type candidate(int i) const {
    return search->found + (static_cast<typename Bits<Norm>::Type>(i + 1) << shift);
  }
  // Bit patterns above infinity are NaNs. finish() ignores them.
  __device__ Norm threshold(int i) const { return Bits<Norm>::to(candidate(i)); }
  __device__ void finish(const Norm (&bounds)[kThresholds]) const {
    typename Bits<Norm>::Type best = search->found;
    for (int i = 0; i < kThresholds; ++i) {
      const auto bits = candidate(i);
      if (bits <= Bits<Norm>::kInfinity && bounds[i] <= search->limit) best = bits;
    }
    search->found = best;
    *tau = Bits<Norm>::to(best);
  }
};

// Computes the bounds of all thresholds of a sweep. Each thread block sums one patch of C.
// `partial` has room for gridDim.x sums for each threshold.
template <class Norm, class Sweep>
__global__ void __launch_bounds__(kProductThreads)
    bound_errors(const NormMaps<Norm> maps, const Sweep sweep, SumOfSquares<Norm>* partial,
                 unsigned* arrived) {
  constexpr int kThresholds = Sweep::kThresholds;
  static_assert(kThresholds <= kProductWarps, "each threshold has a warp to end with");
  __shared__ double patch_lost[kThresholds][kPatchRows][32];
  __shared__ Norm bounds[kThresholds];
  const Patch patch(maps, blockIdx.x);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  Norm tau[kThresholds];
#pragma unroll
  for (int i = 0; i < kThresholds; ++i) tau[i] = sweep.threshold(i);
  double lost[kThresholds][kPatchRows] = {};
  for_each_product(maps, patch, warp, maps.kb, kProductWarps,
                   [&](int r, Norm a, Norm b, Norm skip_norm_b) {
                     const Norm skip_norm = norm_product(a, skip_norm_b);
                     const double product = __dmul_ru(a, b);
#pragma unroll
                     for (int i = 0; i < kThresholds; ++i) {
                       if (!is_valid(skip_norm, tau[i]))
                         lost[i][r] = __dadd_ru(lost[i][r], product);
                     }
                   });
  for (int turn = 0; turn < kProductWarps; ++turn) {
    if (warp == turn) {
#pragma unroll
      for (int i = 0; i < kThresholds; ++i) {
#pragma unroll
        for (int r = 0; r < kPatchRows; ++r) {
          double& sum = patch_lost[i][r][lane];
          sum = turn == 0 ? lost[i][r] : __dadd_ru(sum, lost[i][r]);
        }
      }
    }
    __syncthreads();
  }
  if (warp < kThresholds) {
    SumOfSquares<Norm> squares{};
    for (int r = 0; r < kPatchRows; ++r) squares.add(patch_lost[warp][r][lane]);
    squares = sum_warp(squares);
    if (lane == 0) partial[static_cast<int64_t>(warp) * gridDim.x + blockIdx.x] = squares;
  }
  if (!is_last_block(arrived)) return;

  if (warp < kThresholds) {
    const double root =
        sum_array(partial + static_cast<int64_t>(warp) * gridDim.x, gridDim.x).root();
    if (lane == 0) bounds[warp] = round_up<Norm>(__dmul_ru(root, 1 + kNormSlack<Norm>));
  }
  __syncthreads();
  if (threadIdx.x == 0) sweep.finish(bounds);
}

// Initialises the search. The limit is max_error * norm(A) * norm(B), reduced by the possible
// errors of the norms. Works with any grid; `partial` has room for two sums for each warp of the
// grid.
template <class Norm>
__global__ void __launch_bounds__(kProductThreads)
    start_error_search(const NormMaps<Norm> maps, double max_error, ErrorSearch<Norm>* search,
                       SumOfSquares<Norm>* partial, Norm* tau) {
  const int64_t sizes[2] = {maps.batch * maps.mb * maps.kb, maps.batch * maps.kb * maps.nb};
  const Norm* const norms[2] = {maps.a, maps.b};
  const int64_t threads = static_cast<int64_t>(gridDim.x) * kProductThreads;
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kProductThreads + threadIdx.x;
  const int64_t warps = threads / 32;
  for (int map = 0; map < 2; ++map) {
    SumOfSquares<Norm> own{};
    for (int64_t i = thread; i < sizes[map]; i += threads) own.add(norms[map][i]);
    own = sum_warp(own);
    if (threadIdx.x % 32 == 0) partial[map * warps + thread / 32] = own;
  }
  if (!is_last_block(&search->arrived)) return;
  if (threadIdx.x >= 32) return;
  const double norm_a = sum_array(partial, warps).root();
  const double norm_b = sum_array(partial + warps, warps).root();
  if (threadIdx.x != 0) return;
  const double limit = largest_bound<Norm>(max_error, norm_a, norm_b);
  search->limit = isfinite(limit) ? limit : nan("");
  search->found = 0;
  *tau = 0;
}

}  // namespace spamm::kernels
