// The bound of what skipping loses, sqrt(sum over (i,j) of (sum over skipped k of na * nb)^2), and
// the search for the largest threshold that keeps it within a limit.
//
// All sums are double, rounded upwards, and taken in a fixed order. What is left to cover is that
// each norm itself is only right to 2^-19 (float) or 2^-45 (double): kNormSlack. The bound grows
// with tau, so the search fixes the bits of tau from the top, three in a sweep: each sweep sums for
// seven thresholds at once.
#pragma once

#include <cstdint>

#include "norm_products.cuh"

namespace spamm::kernels {

template <class Norm>
constexpr double kNormSlack = sizeof(Norm) == 4 ? 0x1p-18 : 0x1p-44;

// Sum of squares of non-negative numbers, rounded upwards. Squares of products of float norms fit
// a double.
template <class Norm>
struct SumOfSquares {
  double sum;  // no initializer here or below: arrays of these lie in shared memory
  __device__ void add(double x) { sum = __fma_ru(x, x, sum); }
  __device__ void add(const SumOfSquares& other) { sum = __dadd_ru(sum, other.sum); }
  __device__ double root() const { return __dsqrt_ru(sum); }
};

// Those of double norms do not: small and large ones are summed scaled, each by itself. (Blue, "A
// portable Fortran program to find the Euclidean norm of a vector", 1978.)
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

// The smallest number of the norms' type that is not below x.
template <class Norm>
__device__ Norm round_up(double x) {
  if constexpr (sizeof(Norm) == 4) {
    return __double2float_ru(x);
  } else {
    return x;
  }
}

// Sum over the thread block, in a fixed order; right in thread 0.
template <class Norm>
__device__ SumOfSquares<Norm> sum_block(SumOfSquares<Norm> own) {
  __shared__ SumOfSquares<Norm> threads[kProductThreads];
  __syncthreads();
  threads[threadIdx.x] = own;
  for (int distance = kProductThreads / 2; distance > 0; distance /= 2) {
    __syncthreads();
    if (threadIdx.x < distance) threads[threadIdx.x].add(threads[threadIdx.x + distance]);
  }
  return threads[threadIdx.x];
}

// The sum of what the thread blocks of this launch have left in `partial`; right in thread 0.
template <class Norm>
__device__ SumOfSquares<Norm> sum_blocks(const SumOfSquares<Norm>* partial) {
  SumOfSquares<Norm> own{};
  for (unsigned i = threadIdx.x; i < gridDim.x; i += kProductThreads) own.add(partial[i]);
  return sum_block(own);
}

// A sweep for one given threshold.
template <class Norm>
struct BoundOfTau {
  static constexpr int kThresholds = 1;
  Tau<Norm> tau;
  Norm* bound;

  __device__ Norm threshold(int) const { return tau.value(); }
  __device__ void finish(const Norm (&bounds)[kThresholds]) const { *bound = bounds[0]; }
};

// The state of the search between sweeps.
template <class Norm>
struct ErrorSearch {
  double limit;                     // NaN: no threshold but 0 will do
  typename Bits<Norm>::Type found;  // bits of the largest threshold known to keep the limit
  unsigned arrived;
};

// A sweep that settles three bits of tau, from `shift` up.
template <class Norm>
struct SearchStep {
  static constexpr int kThresholds = 7;
  ErrorSearch<Norm>* search;
  int shift;
  Norm* tau;

  __device__ typename Bits<Norm>::Type candidate(int i) const {
    return search->found + (static_cast<typename Bits<Norm>::Type>(i + 1) << shift);
  }
  // Patterns above infinity are NaNs, which skip nothing.
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

// Bounds for all thresholds of a sweep; a thread block adds up one patch of C. `partial` holds
// gridDim.x sums for each threshold.
template <class Norm, class Sweep>
__global__ void __launch_bounds__(kProductThreads)
    bound_errors(const NormMaps<Norm> maps, const Sweep sweep, SumOfSquares<Norm>* partial,
                 unsigned* arrived) {
  constexpr int kThresholds = Sweep::kThresholds;
  __shared__ double warp_lost[kProductWarps][kPatchRows][32];
  const Patch patch(maps, blockIdx.x);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  Norm tau[kThresholds];
  for (int i = 0; i < kThresholds; ++i) tau[i] = sweep.threshold(i);
  double lost[kPatchRows][kThresholds] = {};
  for_each_product(maps, patch, warp, maps.kb, kProductWarps,
                   [&](int r, Norm a, Norm b, Norm judged_b) {
                     const Norm judged = norm_product(a, judged_b);
                     const double product = __dmul_ru(a, b);
#pragma unroll
                     for (int i = 0; i < kThresholds; ++i) {
                       if (!is_valid(judged, tau[i])) lost[r][i] = __dadd_ru(lost[r][i], product);
                     }
                   });

#pragma unroll
  for (int i = 0; i < kThresholds; ++i) {
    __syncthreads();
#pragma unroll
    for (int r = 0; r < kPatchRows; ++r) warp_lost[warp][r][lane] = lost[r][i];
    __syncthreads();
    SumOfSquares<Norm> squares{};
    if (warp < kPatchRows) {
      double block_lost = 0;
      for (int w = 0; w < kProductWarps; ++w) {
        block_lost = __dadd_ru(block_lost, warp_lost[w][warp][lane]);
      }
      squares.add(block_lost);
    }
    squares = sum_block(squares);
    if (threadIdx.x == 0) partial[static_cast<int64_t>(i) * gridDim.x + blockIdx.x] = squares;
  }
  if (!is_last_block(arrived)) return;

  Norm bounds[kThresholds];
  for (int i = 0; i < kThresholds; ++i) {
    const double root = sum_blocks(partial + static_cast<int64_t>(i) * gridDim.x).root();
    bounds[i] = round_up<Norm>(__dmul_ru(root, 1 + kNormSlack<Norm>));
  }
  if (threadIdx.x == 0) sweep.finish(bounds);
}

// Starts the search: limit = max_error * norm(A) * norm(B), less what the norms' own errors may
// have added. Any grid; `partial` holds 2 * gridDim.x sums.
template <class Norm>
__global__ void __launch_bounds__(kProductThreads)
    start_error_search(const NormMaps<Norm> maps, double max_error, ErrorSearch<Norm>* search,
                       SumOfSquares<Norm>* partial, Norm* tau) {
  const int64_t sizes[2] = {maps.batch * maps.mb * maps.kb, maps.batch * maps.kb * maps.nb};
  const Norm* norms[2] = {maps.a, maps.b};
  for (int map = 0; map < 2; ++map) {
    SumOfSquares<Norm> own{};
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * kProductThreads + threadIdx.x;
         i < sizes[map]; i += static_cast<int64_t>(gridDim.x) * kProductThreads) {
      own.add(norms[map][i]);
    }
    own = sum_block(own);
    if (threadIdx.x == 0) partial[map * gridDim.x + blockIdx.x] = own;
  }
  if (!is_last_block(&search->arrived)) return;
  const double norm_a = sum_blocks(partial).root();
  const double norm_b = sum_blocks(partial + gridDim.x).root();
  if (threadIdx.x != 0) return;
  const double limit = max_error * norm_a * norm_b * (1 - 2 * kNormSlack<Norm>);
  search->limit = isfinite(limit) ? limit : nan("");
  search->found = 0;
  *tau = 0;
}

}  // namespace spamm::kernels
