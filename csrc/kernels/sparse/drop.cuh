// Which blocks of a result are dropped, from their norms: those below a limit, the smallest first.
//
// One thread block does all, because launches would take longer: a matrix of 14,000 functions has
// some 10^4 blocks. What blocks lose is added in whole numbers of a small unit, rounded up, so that
// the limit does not depend on the order of sums.
#pragma once

#include <cstdint>
#include <cub/block/block_reduce.cuh>
#include <cub/block/block_scan.cuh>

#include "kernels/sparse/pattern.h"
#include "kernels/threshold/error_bound.cuh"

namespace spamm::kernels {

constexpr int kDropThreads = 1024;

template <class Norm>
struct DropParams {
  Pattern pattern;
  const Norm* norms;
  int64_t stored;
  double below;  // no block is dropped that has this norm or a larger one
  double share;  // of norm(A) norm(B), that may be lost; negative: no limit
  const Norm *norm_a, *norm_b;
  int64_t stored_a, stored_b;
  bool symmetric;  // a block below the diagonal goes with its mirror image
  // Of the blocks that stay. `places` has stored + 1 numbers; `count` is how many stay.
  int64_t *crow, *col, *numbers, *count;
  Norm *kept_norms, *bound;
  int* places;
};

union DropShared {
  typename cub::BlockReduce<double, kDropThreads>::TempStorage reduce;
  typename cub::BlockScan<int, kDropThreads>::TempStorage scan;
  unsigned long long bins[256];
  double number;
};

// The sum, or with max the largest, of value(i) for i below `count`. All threads get it.
template <class Value, class Combine>
__device__ double reduce_all(int64_t count, DropShared& shared, const Combine& combine,
                             const Value& value) {
  double own = 0;
  for (int64_t i = threadIdx.x; i < count; i += kDropThreads) own = combine(own, value(i));
  __syncthreads();
  const double all = cub::BlockReduce<double, kDropThreads>(shared.reduce).Reduce(own, combine);
  __syncthreads();
  if (threadIdx.x == 0) shared.number = all;
  __syncthreads();
  return shared.number;
}

// The norm of a matrix from value(i), those of its blocks; without overflow.
template <class Value>
__device__ double norm_of_blocks(int64_t count, DropShared& shared, const Value& value) {
  const double largest = reduce_all(
      count, shared, [](double x, double y) { return fmax(x, y); }, value);
  const double scale = largest > 0 && isfinite(largest) ? largest : 1;
  const double sum = reduce_all(
      count, shared, [](double x, double y) { return x + y; },
      [&](int64_t i) {
        const double x = value(i) / scale;
        return x * x;
      });
  return sqrt(sum) * scale;
}

// The smallest norm with which the sum of all norms' squares up to it passes most^2; infinity if
// none does.
template <class Norm>
__device__ double limit_of_loss(const DropParams<Norm>& p, double most, DropShared& shared) {
  using Key = typename Bits<Norm>::Type;
  constexpr int kBits = 8 * sizeof(Norm);
  const double unit = 0x1p62 / static_cast<double>(max(p.stored, int64_t{1}));
  const double slack = 1 + 2 * kNormSlack<Norm>;
  auto left = static_cast<unsigned long long>(unit / (slack * slack));
  Key prefix = 0;
  __shared__ int digit_found;
  for (int shift = kBits - 8; shift >= 0; shift -= 8) {
    __syncthreads();
    if (threadIdx.x < 256) shared.bins[threadIdx.x] = 0;
    __syncthreads();
    for (int64_t first = 0; first < p.stored; first += kDropThreads) {
      const int64_t i = first + threadIdx.x;
      const Norm norm = i < p.stored ? p.norms[i] : 0;
      const Key key = min(Bits<Norm>::of_magnitude(norm), Bits<Norm>::kInfinity);
      const bool counts = i < p.stored && (shift == kBits - 8 || key >> (shift + 8) == prefix);
      unsigned long long units = 0;
      if (counts) {  // after the first digits few do, and divisions are what this takes
        const double ratio = norm / most, square = ratio * ratio;
        units = __double2ull_ru((square < 1.5 ? square : 1.5) * unit);
      }
      const int digit = counts ? static_cast<int>(key >> shift & 255) : -1;
      int same;  // neighbours are often alike, and one sum is faster than 32 in turn
      __match_all_sync(~0u, digit, &same);
      if (same) {
#pragma unroll
        for (int distance = 16; distance > 0; distance /= 2) {
          units += __shfl_xor_sync(~0u, units, distance);
        }
      }
      if (counts && (!same || threadIdx.x % 32 == 0)) atomicAdd(&shared.bins[digit], units);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      digit_found = 0;
      while (digit_found < 256 && shared.bins[digit_found] <= left) {
        left -= shared.bins[digit_found++];
      }
    }
    __syncthreads();
    if (digit_found == 256) return INFINITY;
    prefix = prefix << 8 | static_cast<Key>(digit_found);
  }
  return Bits<Norm>::to(prefix);
}

template <class Norm>
__global__ void __launch_bounds__(kDropThreads)
    drop_blocks(const __grid_constant__ DropParams<Norm> p) {
  __shared__ DropShared shared;
  double limit = p.below;
  if (p.share >= 0) {
    const auto norm_of = [&](const Norm* norms, int64_t count) {
      return norm_of_blocks(count, shared, [&](int64_t i) -> double { return norms[i]; });
    };
    const double whole = norm_of(p.norm_a, p.stored_a) * norm_of(p.norm_b, p.stored_b);
    const double most = isfinite(whole) ? p.share * whole * (1 - 4 * kNormSlack<Norm>) : 0;
    // The digits are thread 0's to find: the others read what it found.
    limit = most > 0 ? fmin(limit, limit_of_loss(p, most, shared)) : 0;
  }
  const auto stays = [&](int64_t e) { return !(p.norms[e] < limit); };
  for (int row = threadIdx.x / 32; row < p.pattern.rows; row += kDropThreads / 32) {
    for (int e = p.pattern.crow[row] + threadIdx.x % 32; e < p.pattern.crow[row + 1]; e += 32) {
      const int column = p.pattern.col[e];
      const int mirror = p.symmetric && column < row ? p.pattern.find(column, row) : e;
      p.places[e] = stays(mirror < 0 ? e : mirror);
    }
  }
  __syncthreads();
  const double gone = norm_of_blocks(
      p.stored, shared, [&](int64_t e) -> double { return p.places[e] ? 0 : double{p.norms[e]}; });
  int before = 0;
  for (int64_t first = 0; first < p.stored; first += kDropThreads) {
    const int64_t e = first + threadIdx.x;
    const int own = e < p.stored ? p.places[e] : 0;
    int place, sum;
    cub::BlockScan<int, kDropThreads>(shared.scan).ExclusiveSum(own, place, sum);
    place += before;
    if (own)
      p.numbers[place] = e, p.col[place] = p.pattern.col[e], p.kept_norms[place] = p.norms[e];
    if (e < p.stored) p.places[e] = place;
    before += sum;
    __syncthreads();
  }
  if (threadIdx.x == 0) {
    p.places[p.stored] = before;
    *p.count = before;
    const double bound = gone * (1 + 2 * kNormSlack<Norm>);
    *p.bound = round_up<Norm>(bound);
  }
  __syncthreads();
  for (int row = threadIdx.x; row <= p.pattern.rows; row += kDropThreads) {
    p.crow[row] = p.places[p.pattern.crow[row]];
  }
}

}  // namespace spamm::kernels
