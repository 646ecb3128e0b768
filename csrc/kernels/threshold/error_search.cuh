// The largest tau whose error bound (error_bound.cuh) is within a limit, found on the device.
//
// The bound grows with tau, and changes only where tau passes a product of norms. So the result is
// the product at which the limit would be passed. The search works on keys (norm_products.cuh): a
// sweep cuts an interval of keys into bins, and threads add up in which bins a block of C would
// lose how much. The sums over the bins give the bound at the end of each bin, and the bin in
// which it passes the limit is the next interval. The search ends when one key is left.
// One launch: a single thread block for small maps, else a cooperative grid.
//
// Sums are rounded upwards, as the bound's own, but in another order: kOrderSlack covers that.
#pragma once

#include <cmath>
#include <cstdint>

#include "kernels/common/overlap.cuh"
#include "kernels/threshold/error_bound.cuh"
#include "kernels/threshold/norm_products.cuh"
#include "norm_slack.h"

namespace spamm::kernels {

constexpr int kLog2LossBins = 5, kLossBins = 1 << kLog2LossBins;
constexpr int kMostSearchThreads = 384, kMostSearchWarps = kMostSearchThreads / 32;
constexpr int kMostSearchBlocks = 256;

using SearchKey = unsigned long long;  // a key of either type

// The keys that a sweep meets.
struct SearchKeys {
  SearchKey least, most;  // in the interval
  SearchKey next;         // the least one above it

  template <class Norm>
  __device__ static SearchKeys none() {
    return {Bits<Norm>::kInfinity, 0, Bits<Norm>::kInfinity};
  }
  __device__ void include(const SearchKeys& other) {
    least = min(least, other.least);
    most = max(most, other.most);
    next = min(next, other.next);
  }
  __device__ void include_lanes() {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      include({__shfl_xor_sync(~0u, least, distance), __shfl_xor_sync(~0u, most, distance),
               __shfl_xor_sync(~0u, next, distance)});
    }
  }
};

// The findings of a sweep, by one warp, one thread block or all. Each lane of a warp has a bin.
struct Sweep {
  static_assert(kLossBins == 32);
  double square;  // the square of the scaled bound at the end of the lane's bin
  SearchKeys keys;
};

// The messages between the thread blocks of a launch. Sweeps use the halves in turn.
template <class Norm>
struct ErrorSearch {
  SumOfSquares<Norm> norms[2][kMostSearchBlocks];  // of A and of B
  double squares[2][kMostSearchBlocks][kLossBins];
  SearchKeys keys[2][kMostSearchBlocks];
};

// The messages between the warps of a thread block.
struct WarpSweeps {
  double squares[kMostSearchWarps][kLossBins];
  SearchKeys keys[kMostSearchWarps];
};

// Shared memory. The bins of each thread follow it: kLossBins doubles each. Sweeps use the halves
// in turn, so that no warp overwrites what another still reads.
template <class Norm>
struct ErrorSearchShared {
  SumOfSquares<Norm> norms[2][kMostSearchWarps];
  WarpSweeps of_block[2], of_grid[2];
  double below[kMostSearchThreads];  // what each thread loses below the interval
};

template <class Norm>
constexpr int64_t error_search_bytes(int64_t threads) {
  return sizeof(ErrorSearchShared<Norm>) + threads * kLossBins * sizeof(double);
}

// The keys from low on, below end.
struct SearchInterval {
  SearchKey low, end;

  // A bin has 2^shift() keys.
  __device__ int shift() const {
    const int bits = 64 - __clzll(static_cast<long long>(end - low - 1));
    return max(bits - kLog2LossBins, 0);
  }
};

// The norms of both matrices, from the norms of their blocks.
template <bool kGrid, class Norm>
__device__ void sum_norms(const Norm* const (&data)[2], const int64_t (&sizes)[2],
                          ErrorSearch<Norm>* global, ErrorSearchShared<Norm>& shared,
                          double (&norms)[2]) {
  const int64_t threads = static_cast<int64_t>(gridDim.x) * blockDim.x;
  SumOfSquares<Norm> sums[2];
  for (int map = 0; map < 2; ++map) {
    SumOfSquares<Norm> own{};
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < sizes[map];
         i += threads) {
      own.add(at_least(data[map][i]));
    }
    own = sum_warp(own);
    if (threadIdx.x % 32 == 0) shared.norms[map][threadIdx.x / 32] = own;
    __syncthreads();
    SumOfSquares<Norm> total{};
    for (int warp = 0; warp < blockDim.x / 32; ++warp) total.add(shared.norms[map][warp]);
    sums[map] = total;
    if (kGrid && threadIdx.x == 0) global->norms[map][blockIdx.x] = sums[map];
  }
  if constexpr (kGrid) {
    meet();
    for (int map = 0; map < 2; ++map) sums[map] = sum_array(global->norms[map], gridDim.x);
  }
  for (int map = 0; map < 2; ++map) norms[map] = sums[map].root();
}

// The start of the search, and when a sum of squares is within the limit. Numbers are scaled by a
// power of two so that squares neither overflow nor vanish.
template <class Norm>
struct SearchLimit {
  double scale, most_square;
  SearchInterval interval;

  // `spread`: the bound, if each product loses 1, is at most this. `factor`: a single product of
  // `factor` times the limit passes it. The scaled limit is about 2^log2_unit.
  __device__ SearchLimit(double limit, double spread, double order_slack, double factor,
                         int log2_unit = 0) {
    constexpr int kLeastExponent = -940, kMostExponent = 1022;
    const int exponent =
        limit > 0 ? min(max(ilogb(limit), kLeastExponent), kMostExponent) : kLeastExponent;
    scale = scalbn(1.0, log2_unit - exponent);
    const double slack = __dmul_ru(1 + kNormSlack<Norm>, 1 + order_slack);
    const double scaled = limit * scale;
    most_square = __ddiv_rd(__dmul_rd(scaled, scaled), __dmul_ru(slack, slack));

    // Below this, all products together are within the limit: at_most at most doubles a norm.
    const auto low = static_cast<Norm>(0.24 * limit / spread);
    interval.low = low >= Bits<Norm>::to(kLeastNormal) ? Bits<Norm>::of_magnitude(low) : 0;
    const auto end = static_cast<Norm>(factor * limit);
    interval.end = max(SearchKey{Bits<Norm>::of_magnitude(end)}, interval.low + 1);
  }

 private:
  static constexpr typename Bits<Norm>::Type kLeastNormal = typename Bits<Norm>::Type{1}
                                                            << (sizeof(Norm) == 4 ? 23 : 52);
};

// Values of k whose norms are loaded together, if B has no own skip norms. Eight do not fit sm_80.
template <class Norm>
#if __CUDA_ARCH__ >= 900
constexpr int kNormsAhead = 8;
#else
constexpr int kNormsAhead = sizeof(Norm) == 4 ? 6 : 7;
#endif

// The losses of one block of C by its products with k in [first, last): those below the interval in
// `base`, the others in the thread's bins. kSkipNorms: B has skip norms of its own.
template <bool kSkipNorms, class Norm>
__device__ void add_losses(const NormMaps<Norm>& maps, int64_t place, int first, int last,
                           const SearchInterval& interval, int shift, double* bins, double& base,
                           SearchKeys& keys) {
  constexpr int kAhead = kSkipNorms ? 4 : kNormsAhead<Norm>;
  // 64-bit divisions would take as long as a small sum.
  const bool is_narrow = place >> 32 == 0;
  const int64_t row =
      is_narrow ? static_cast<uint32_t>(place) / static_cast<uint32_t>(maps.nb) : place / maps.nb;
  const int64_t batch = maps.batch == 1 ? 0 : row / maps.mb;
  const Norm* const a = maps.a + row * maps.kb;
  const int64_t in_b = batch * maps.kb * maps.nb + (place - row * maps.nb);
  for (; first < last; first += kAhead) {
    Norm norm_a[kAhead], norm_b[kAhead], skip_norms[kSkipNorms ? kAhead : 1];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int k = min(first + i, last - 1);
      const int64_t at = in_b + static_cast<int64_t>(k) * maps.nb;
      norm_a[i] = a[k];
      norm_b[i] = maps.b[at];
      if constexpr (kSkipNorms) skip_norms[i] = maps.skip_norm_b[at];
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (first + i >= last) break;
      const Norm skip_norm = kSkipNorms ? skip_norms[kSkipNorms ? i : 0] : norm_b[i];
      const SearchKey key = product_key(norm_a[i], skip_norm);
      const double loss = __dmul_ru(at_most(norm_a[i]), at_most(norm_b[i]));
      if (key < interval.low) {
        base = __dadd_ru(base, loss);
      } else if (key >= interval.end) {
        keys.next = min(keys.next, key);
      } else {
        keys.least = min(keys.least, key), keys.most = max(keys.most, key);
        double& bin = bins[((key - interval.low) >> shift) * blockDim.x];
        bin = __dadd_ru(bin, loss);
      }
    }
  }
}

// Adds the bins of all threads of a block of C to those of the first of them, and what they lose
// below the interval to its `base`. All threads call it; `own` is the block's number.
template <class Norm>
__device__ void add_parts(double* all_bins, int lanes, int parts, int part, int own, double& base,
                          ErrorSearchShared<Norm>& shared) {
  shared.below[threadIdx.x] = base;
  __syncthreads();
  for (int i = part; i < kLossBins; i += parts) {
    double* const bins = all_bins + i * blockDim.x + own;
    double sum = bins[0];
    for (int other = 1; other < parts; ++other) sum = __dadd_ru(sum, bins[other * lanes]);
    bins[0] = sum;
  }
  if (part == 0) {
    for (int other = 1; other < parts; ++other) {
      base = __dadd_ru(base, shared.below[own + other * lanes]);
    }
  }
  __syncthreads();
}

// The sum over the lanes of a warp of each value. Lane i gets that of value i. Each step halves the
// number of values that a lane still sums.
template <int kCount = 32>
__device__ __forceinline__ double sum_for_each_lane(double (&values)[kCount]) {
  if constexpr (kCount == 1) {
    return values[0];
  } else {
    constexpr int kHalf = kCount / 2;
    const bool has_upper = (threadIdx.x & kHalf) != 0;
    double sums[kHalf];
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      const double kept = has_upper ? values[i + kHalf] : values[i];
      const double sent = has_upper ? values[i] : values[i + kHalf];
      sums[i] = __dadd_ru(kept, __shfl_xor_sync(~0u, sent, kHalf));
    }
    return sum_for_each_lane(sums);
  }
}

// Joins the findings of the warps of a thread block. All warps get it.
template <class Norm>
__device__ Sweep combine_warps(const Sweep& own, WarpSweeps& warps) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, count = blockDim.x / 32;
  warps.squares[warp][lane] = own.square;
  if (lane == 0) warps.keys[warp] = own.keys;
  __syncthreads();
  Sweep all{0, lane < count ? warps.keys[lane] : SearchKeys::none<Norm>()};
  for (int i = 0; i < count; ++i) all.square = __dadd_ru(all.square, warps.squares[i][lane]);
  all.keys.include_lanes();
  return all;
}

// Joins the findings of all thread blocks. All warps get it. `half` is the turn's half of `global`.
template <class Norm>
__device__ Sweep combine_blocks(const Sweep& own, int half, ErrorSearch<Norm>* global,
                                ErrorSearchShared<Norm>& shared) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
  if (warp == 0) {
    global->squares[half][blockIdx.x][lane] = own.square;
    if (lane == 0) global->keys[half][blockIdx.x] = own.keys;
  }
  meet();
  constexpr int kAhead = 16;  // loads in flight: most launches need no more
  Sweep part{0, SearchKeys::none<Norm>()};
  for (int block = threadIdx.x; block < gridDim.x; block += blockDim.x) {
    part.keys.include(global->keys[half][block]);
  }
  for (int first = warp; first < gridDim.x; first += kAhead * warps) {
    double squares[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int block = first + i * warps;
      squares[i] = block < gridDim.x ? global->squares[half][block][lane] : 0;
    }
#pragma unroll
    for (const double square : squares) part.square = __dadd_ru(part.square, square);
  }
  part.keys.include_lanes();
  return combine_warps<Norm>(part, shared.of_grid[half]);
}

// One sweep over all products. `parts` threads share a block of C, each with its own k; those of a
// warp have the same. All warps of all thread blocks get the same result.
template <bool kGrid, class Norm>
__device__ Sweep sweep(const NormMaps<Norm>& maps, const SearchInterval& interval, double scale,
                       int parts, int half, double* all_bins, ErrorSearch<Norm>* global,
                       ErrorSearchShared<Norm>& shared) {
  const int64_t places = maps.batch * maps.mb * maps.nb;
  const int lanes = blockDim.x / parts, part = threadIdx.x / lanes;
  const int own = threadIdx.x - part * lanes;
  const int depth = (maps.kb - 1) / parts + 1, first = part * depth;
  const int last = min(first + depth, maps.kb);
  const int shift = interval.shift();
  double* const bins = all_bins + threadIdx.x;
  double squares[kLossBins] = {};
  auto keys = SearchKeys::none<Norm>();
  for (int64_t of_block = static_cast<int64_t>(blockIdx.x) * lanes; of_block < places;
       of_block += static_cast<int64_t>(gridDim.x) * lanes) {
#pragma unroll
    for (int i = 0; i < kLossBins; ++i) bins[i * blockDim.x] = 0;
    double lost = 0;
    const int64_t place = of_block + own;
    if (place < places && maps.skip_norm_b == maps.b) {
      add_losses<false>(maps, place, first, last, interval, shift, bins, lost, keys);
    } else if (place < places) {
      add_losses<true>(maps, place, first, last, interval, shift, bins, lost, keys);
    }
    if (parts > 1) add_parts(all_bins, lanes, parts, part, own, lost, shared);
    if (part > 0) continue;
#pragma unroll
    for (int i = 0; i < kLossBins; ++i) {
      lost = __dadd_ru(lost, bins[i * blockDim.x]);
      const double scaled = __dmul_ru(lost, scale);
      squares[i] = __fma_ru(scaled, scaled, squares[i]);
    }
  }
  keys.include_lanes();
  const Sweep found =
      combine_warps<Norm>({sum_for_each_lane(squares), keys}, shared.of_block[half]);
  if constexpr (kGrid) {
    return combine_blocks(found, half, global, shared);
  } else {
    return found;
  }
}

// The largest key whose bound is within the limit. `sweep_of(interval, half)` sweeps all products.
template <class Norm, class SweepOf>
__device__ SearchKey search_keys(const SearchLimit<Norm>& start, const SweepOf& sweep_of) {
  SearchInterval interval = start.interval;
  // At `low` the bound is within the limit. At `end` it is not, but perhaps before the first sweep.
  for (int half = 0;; half ^= 1) {
    const Sweep total = sweep_of(interval, half);
    const unsigned passes = ~__ballot_sync(~0u, total.square <= start.most_square);
    if (passes == 0) return total.keys.next;
    const int bin = __ffs(static_cast<int>(passes)) - 1, shift = interval.shift();
    const SearchKey low = interval.low + (SearchKey{static_cast<unsigned>(bin)} << shift);
    interval = {max(low, total.keys.least),
                min(min(low + (SearchKey{1} << shift), interval.end), total.keys.most + 1)};
    if (interval.end <= interval.low + 1) return interval.low;
  }
}

// `bins` doubles for all threads follow ErrorSearchShared in dynamic shared memory. kGrid: the
// launch is cooperative and has up to kMostSearchBlocks thread blocks; if not, one, and `global` is
// unused. `parts`: threads for each block of C; the warps of a thread block are a multiple of it.
template <bool kGrid, class Norm>
__global__ void __launch_bounds__(kMostSearchThreads, 1)
    find_tau_for_error(const __grid_constant__ NormMaps<Norm> maps, double max_error, int parts,
                       ErrorSearch<Norm>* global, Norm* tau) {
  extern __shared__ __align__(16) unsigned char memory[];
  auto& shared = *reinterpret_cast<ErrorSearchShared<Norm>*>(memory);
  auto* const bins = reinterpret_cast<double*>(memory + sizeof(ErrorSearchShared<Norm>));
  let_next_kernel_start();
  wait_for_previous_kernel();

  double norms[2];
  const int64_t sizes[2] = {maps.batch * maps.mb * maps.kb, maps.batch * maps.kb * maps.nb};
  sum_norms<kGrid>({maps.a, maps.b}, sizes, global, shared, norms);
  const double limit = largest_bound<Norm>(max_error, norms[0], norms[1]);
  SearchKey found = 0;
  if (!isfinite(limit)) {
    found = may_skip_all(max_error, norms[0], norms[1]) ? Bits<Norm>::kInfinity : 0;
  } else {
    const double places = static_cast<double>(maps.batch) * maps.mb * maps.nb;
    // A sum of n numbers is off by less than n roundings; here and in the bound itself.
    const double order_slack = (maps.kb + places / 4096 + 128) * 0x1p-53;
    // Skip norms may be some times as large as norms.
    const double factor = maps.skip_norm_b == maps.b ? 2 : 32;
    const SearchLimit<Norm> start(limit, sqrt(places) * maps.kb, order_slack, factor);
    found = search_keys(start, [&](const SearchInterval& interval, int half) {
      return sweep<kGrid>(maps, interval, start.scale, parts, half, bins, global, shared);
    });
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    *tau = Bits<Norm>::to(static_cast<typename Bits<Norm>::Type>(found));
  }
}

}  // namespace spamm::kernels
