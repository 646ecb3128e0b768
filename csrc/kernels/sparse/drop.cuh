// The choice of a result's blocks to drop, by their norms: below a limit, the smallest first.
//
// The search of threshold/error_search.cuh finds the limit. What blocks lose is added in whole
// numbers of a small unit, rounded up, so that the limit does not depend on the order of sums. Each
// thread block then lists what stays in its own run of rows.
#pragma once

#include <cstdint>

#include "kernels/multiply/params.h"
#include "kernels/sparse/losses.cuh"

namespace spamm::kernels {

constexpr int kDropThreads = kMostSearchThreads, kDropWarps = kDropThreads / 32;

// The messages between the thread blocks, and between their warps.
template <class Norm>
struct DropWork {
  static constexpr int kMostWarps = kMostSearchBlocks * kDropWarps;
  ErrorSearch<Norm> search;
  SumOfSquares<Norm> gone[kMostWarps], kept[kMostWarps];
  double traces[kMostWarps];
  int64_t counts[kMostWarps];
};

// The sum of an array by one warp, in a fixed order. All lanes get it.
template <class T>
__device__ T sum_of(const T* numbers, int count) {
  T own = 0;
  for (int i = threadIdx.x % 32; i < count; i += 32) own += numbers[i];
  return __shfl_sync(~0u, sum_through(own), 31);
}

// The loss of the blocks whose norms are below the end of each bin; see Sweep.
template <class Norm>
__device__ Sweep sweep_norms(const DropParams<Norm>& p, const SearchInterval& interval, double most,
                             double unit, int half, ErrorSearchShared<Norm>& shared) {
  const int lane = threadIdx.x % 32, shift = interval.shift();
  auto keys = SearchKeys::none<Norm>();
  unsigned long long lost = 0;  // in the lane's bin
  const int64_t step = int64_t{gridDim.x} * kDropThreads;
  for (int64_t first = int64_t{blockIdx.x} * kDropThreads + threadIdx.x - lane; first < p.stored;
       first += step) {
    const Norm norm = first + lane < p.stored ? p.norms[first + lane] : Norm{INFINITY};
    const SearchKey key = min(Bits<Norm>::of_magnitude(norm), Bits<Norm>::kInfinity);
    int bin = -1;
    unsigned long long units = 0;
    if (key >= interval.end) {
      keys.next = min(keys.next, key);
    } else {
      if (key >= interval.low) keys.least = min(keys.least, key), keys.most = max(keys.most, key);
      bin = key < interval.low ? 0 : static_cast<int>((key - interval.low) >> shift);
      const double ratio = at_most(norm) / most, square = ratio * ratio;
      units = __double2ull_ru((square < 1.5 ? square : 1.5) * unit);
    }
#pragma unroll 8
    for (int source = 0; source < 32; ++source) {
      const unsigned long long of_source = __shfl_sync(~0u, units, source);
      if (__shfl_sync(~0u, bin, source) == lane) lost += of_source;
    }
  }
  keys.include_lanes();
  const Sweep own{__ull2double_ru(sum_through(lost)), keys};
  return combine_blocks(combine_warps<Norm>(own, shared.of_block[half]), half, &p.work->search,
                        shared);
}

// The largest norm for which all smaller ones, together, are at most `most`; infinity if all are.
template <class Norm>
__device__ double limit_of_loss(const DropParams<Norm>& p, double most,
                                ErrorSearchShared<Norm>& shared) {
  // Sums up to `most` are whole numbers below 2^53, and those of all blocks fit 64 bits.
  const double stored = p.stored, slack = 1 + 2 * kNormSlack<Norm>;
  const double unit = fmin(0x1p52, 0x1p62 / stored);
  SearchLimit<Norm> start(most, sqrt(stored), 0, 2);
  start.most_square = floor(unit / (slack * slack));
  const SearchKey found = search_keys(start, [&](const SearchInterval& interval, int half) {
    return sweep_norms(p, interval, most, unit, half, shared);
  });
  return Bits<Norm>::to(static_cast<typename Bits<Norm>::Type>(found));
}

// Marks which blocks stay in rows `begin` to `end` - 1, and tells the other thread blocks of them.
// crow then has how many stay in each row.
template <class Norm>
__device__ void mark_rows(const DropParams<Norm>& p, double limit, int begin, int end) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  SumOfSquares<Norm> gone{}, kept{};
  double trace = 0;
  int64_t count = 0;
  for (int row = begin + warp; row < end; row += kDropWarps) {
    const int last = p.pattern.crow[row + 1];
    int stay = 0;
    for (int first = p.pattern.crow[row]; first < last; first += 32) {
      const int e = first + lane, column = e < last ? p.pattern.col[e] : -1;
      bool stays = false;
      if (e < last) {
        const int mirror = p.symmetric && column < row ? p.pattern.find(column, row) : e;
        stays = !(p.norms[mirror < 0 ? e : mirror] < limit);
        p.stays[e] = stays;
        if (stays) kept.add(p.norms[e]);
        if (!stays) gone.add(at_most(p.norms[e]));
      }
      stay += __popc(__ballot_sync(~0u, stays));
      const unsigned diagonal = __ballot_sync(~0u, stays && column == row);
      if (p.values == nullptr || diagonal == 0) continue;
      const Norm* const block = p.values + int64_t{first + __ffs(diagonal) - 1} * p.edge * p.edge;
      for (int i = lane; i < p.edge; i += 32) trace += block[i * (p.edge + 1)];
    }
    if (lane == 0) p.crow[row] = stay;
    count += stay;
  }
  gone = sum_warp(gone), kept = sum_warp(kept), trace = sum_through(trace);
  if (lane != 31) return;
  const int own = blockIdx.x * kDropWarps + warp;
  p.work->gone[own] = gone, p.work->kept[own] = kept;
  p.work->traces[own] = trace, p.work->counts[own] = count;
}

// Finds where the blocks go that stay in these rows, by one warp. The last thread block also writes
// what all tell.
template <class Norm>
__device__ void place_rows(const DropParams<Norm>& p, int begin, int end) {
  const int lane = threadIdx.x % 32;
  int64_t next = sum_of(p.work->counts, blockIdx.x * kDropWarps);
  for (int first = begin; first < end; first += 32) {
    const int row = first + lane;
    const int64_t own = row < end ? p.crow[row] : 0, through = sum_through(own);
    if (row < end) p.crow[row] = next + through - own;
    next += __shfl_sync(~0u, through, 31);
  }
  if (blockIdx.x != gridDim.x - 1) return;
  const int warps = gridDim.x * kDropWarps;
  const double trace = sum_of(p.work->traces, warps);
  const double gone = sum_array(p.work->gone, warps).root();
  const double norm = sum_array(p.work->kept, warps).root();
  if (lane != 0) return;
  p.crow[end] = next;
  *p.bound = round_up<Norm>(at_most(__dmul_ru(gone, 1 + 2 * kNormSlack<Norm>)));
  *p.totals = {next, trace, norm};
}

// A cooperative grid of at most kMostSearchBlocks thread blocks.
template <class Norm>
__global__ void __launch_bounds__(kDropThreads, 1)
    drop_blocks(const __grid_constant__ DropParams<Norm> p) {
  __shared__ ErrorSearchShared<Norm> shared;
  wait_for_previous_kernel();
  double limit = p.below;
  if (p.share >= 0) {
    double norms[2];
    const int64_t sizes[2] = {p.stored_a, p.stored_b};
    sum_norms<true>({p.norm_a, p.norm_b}, sizes, &p.work->search, shared, norms);
    const double whole = norms[0] * norms[1];
    const double most = isfinite(whole) ? p.share * whole * (1 - 4 * kNormSlack<Norm>) : 0;
    if (!(most > 0)) limit = 0;
    if (most > 0 && isfinite(most)) limit = fmin(limit, limit_of_loss(p, most, shared));
  }
  const int64_t rows = p.pattern.rows;
  const auto begin = static_cast<int>(rows * blockIdx.x / gridDim.x);
  const auto end = static_cast<int>(rows * (blockIdx.x + 1) / gridDim.x);
  mark_rows(p, limit, begin, end);
  meet();
  if (threadIdx.x < 32) place_rows(p, begin, end);
  __syncthreads();
  const int lane = threadIdx.x % 32;
  for (int row = begin + static_cast<int>(threadIdx.x) / 32; row < end; row += kDropWarps) {
    const int last = p.pattern.crow[row + 1];
    int64_t next = p.crow[row];
    for (int first = p.pattern.crow[row]; first < last; first += 32) {
      const int e = first + lane;
      const bool stays = e < last && p.stays[e];
      const unsigned staying = __ballot_sync(~0u, stays);
      const int64_t place = next + __popc(staying & ((1u << lane) - 1));
      if (stays) {
        p.numbers[place] = e, p.col[place] = p.pattern.col[e], p.kept_norms[place] = p.norms[e];
      }
      next += __popc(staying);
    }
  }
}

}  // namespace spamm::kernels
