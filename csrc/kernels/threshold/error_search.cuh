// The largest tau whose error bound (error_bound.cuh) is within a limit, found on the device.
//
// The bound grows with tau, and changes only where tau passes a product of norms. So the result is
// the product at which the limit would be passed. The search works on keys (norm_products.cuh): a
// sweep cuts an interval of keys into bins, and each thread adds up in which bins a block of C
// would lose how much. The sums over the bins give the bound at the end of each bin, and the bin in
// which it passes the limit is the next interval. The search ends when one key is left.
// One launch: a single thread block for small maps, else a cooperative grid.
//
// Sums are rounded upwards, as the bound's own, but in another order: kOrderSlack covers that.
#pragma once

#include <cmath>
#include <cstdint>

#include "kernels/common/overlap.cuh"
#include "kernels/threshold/meeting.cuh"
#include "kernels/threshold/norm_products.cuh"
#include "kernels/threshold/sum_of_squares.cuh"
#include "norm_slack.h"

namespace spamm::kernels {

constexpr int kLog2LossBins = 5, kLossBins = 1 << kLog2LossBins;
constexpr int kMostSearchThreads = 384, kMostSearchWarps = kMostSearchThreads / 32;
constexpr int kMostSearchBlocks = 256;

using SearchKey = unsigned long long;  // a key of either type

// What a sweep finds, by one thread block or by all.
struct Sweep {
  double squares[kLossBins];  // the square of the scaled bound at the end of each bin
  SearchKey least, most;      // the keys in the interval
  SearchKey next;             // the least key above it

  // Takes over the keys of another part of the sweep.
  __device__ void include(SearchKey other_least, SearchKey other_most, SearchKey other_next) {
    least = min(least, other_least);
    most = max(most, other_most);
    next = min(next, other_next);
  }
  __device__ void include_lanes() {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      include(__shfl_xor_sync(~0u, least, distance), __shfl_xor_sync(~0u, most, distance),
              __shfl_xor_sync(~0u, next, distance));
    }
  }
};

// What the thread blocks of a launch tell each other. Sweeps use the halves in turn.
template <class Norm>
struct ErrorSearch {
  SumOfSquares<Norm> norms[2][kMostSearchBlocks];  // of A and of B
  double squares[2][kLossBins][kMostSearchBlocks];
  SearchKey least[2][kMostSearchBlocks], most[2][kMostSearchBlocks], next[2][kMostSearchBlocks];
};

// Shared memory. The bins of each thread follow it: kLossBins doubles each.
template <class Norm>
struct ErrorSearchShared {
  SumOfSquares<Norm> norms[2][kMostSearchWarps];
  Sweep warps[kMostSearchWarps];
  Sweep total;
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

// The sum over a thread block of each thread's share. All threads get it.
template <class Norm>
__device__ SumOfSquares<Norm> sum_block(SumOfSquares<Norm> own,
                                        SumOfSquares<Norm> (&shared)[kMostSearchWarps]) {
  own = sum_warp(own);
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = own;
  __syncthreads();
  SumOfSquares<Norm> total{};
  for (int warp = 0; warp < blockDim.x / 32; ++warp) total.add(shared[warp]);
  return total;
}

// The norms of both matrices, from their maps.
template <bool kGrid, class Norm>
__device__ void sum_norms(const NormMaps<Norm>& maps, ErrorSearch<Norm>* global,
                          ErrorSearchShared<Norm>& shared, double (&norms)[2]) {
  const int64_t sizes[2] = {maps.batch * maps.mb * maps.kb, maps.batch * maps.kb * maps.nb};
  const Norm* const data[2] = {maps.a, maps.b};
  const int64_t threads = static_cast<int64_t>(gridDim.x) * blockDim.x;
  SumOfSquares<Norm> sums[2];
  for (int map = 0; map < 2; ++map) {
    SumOfSquares<Norm> own{};
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < sizes[map];
         i += threads) {
      own.add(data[map][i]);
    }
    sums[map] = sum_block(own, shared.norms[map]);
    if (kGrid && threadIdx.x == 0) global->norms[map][blockIdx.x] = sums[map];
  }
  if constexpr (kGrid) {
    Meeting<true> meeting;
    meeting.arrive();
    meeting.wait();
    for (int map = 0; map < 2; ++map) sums[map] = sum_array(global->norms[map], gridDim.x);
  }
  for (int map = 0; map < 2; ++map) norms[map] = sums[map].root();
}

// Where the search begins, and when a sum of squares is within the limit. Numbers are scaled by a
// power of two so that squares neither overflow nor vanish.
template <class Norm>
struct SearchLimit {
  double scale, most_square;
  SearchInterval interval;

  __device__ SearchLimit(const NormMaps<Norm>& maps, double limit) {
    constexpr int kMostExponent = 1000;
    const int exponent =
        limit > 0 ? min(max(ilogb(limit), -kMostExponent), kMostExponent) : -kMostExponent;
    scale = scalbn(1.0, -exponent);
    const double places = static_cast<double>(maps.batch) * maps.mb * maps.nb;
    // A sum of n numbers is off by less than n roundings; here and in the bound itself.
    const double order_slack = (maps.kb + places / 4096 + 128) * 0x1p-53;
    const double slack = __dmul_ru(1 + kNormSlack<Norm>, 1 + order_slack);
    const double scaled = limit * scale;
    most_square = __ddiv_rd(__dmul_rd(scaled, scaled), __dmul_ru(slack, slack));

    // Below this, all products together are within the limit.
    const auto low = static_cast<Norm>(0.99 * limit / (sqrt(places) * maps.kb));
    interval.low = low >= Bits<Norm>::to(kLeastNormal) ? Bits<Norm>::of_magnitude(low) : 0;
    // From here on, a single product passes it. Skip norms may be some times as large as norms.
    const double factor = maps.skip_norm_b == maps.b ? 2 : 32;
    const auto end = static_cast<Norm>(factor * limit);
    interval.end = max(SearchKey{Bits<Norm>::of_magnitude(end)}, interval.low + 1);
  }

 private:
  static constexpr typename Bits<Norm>::Type kLeastNormal = typename Bits<Norm>::Type{1}
                                                            << (sizeof(Norm) == 4 ? 23 : 52);
};

// The losses of one block of C: those below the interval in `base`, the others in the thread's
// bins.
template <class Norm>
__device__ void add_losses(const NormMaps<Norm>& maps, int64_t place,
                           const SearchInterval& interval, int shift, double* bins, double& base,
                           Sweep& keys) {
  // 64-bit divisions would take as long as a small sum.
  const bool is_narrow = place >> 32 == 0;
  const int64_t row =
      is_narrow ? static_cast<uint32_t>(place) / static_cast<uint32_t>(maps.nb) : place / maps.nb;
  const int64_t batch = maps.batch == 1 ? 0 : row / maps.mb;
  const Norm* const a = maps.a + row * maps.kb;
  const int64_t in_b = batch * maps.kb * maps.nb + (place - row * maps.nb);
  for (int first = 0; first < maps.kb; first += kBatch) {
    Norm norm_a[kBatch], norm_b[kBatch], skip_norm_b[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int k = min(first + i, maps.kb - 1);
      norm_a[i] = a[k];
      norm_b[i] = maps.b[in_b + static_cast<int64_t>(k) * maps.nb];
      skip_norm_b[i] = maps.skip_norm_b[in_b + static_cast<int64_t>(k) * maps.nb];
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (first + i >= maps.kb) break;
      const SearchKey key = min(Bits<Norm>::of_magnitude(norm_product(norm_a[i], skip_norm_b[i])),
                                Bits<Norm>::kInfinity);
      const double loss = __dmul_ru(norm_a[i], norm_b[i]);
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

// One sweep over all products. The result is in shared.total. `half` is the turn's half of
// `global`.
template <bool kGrid, class Norm>
__device__ void sweep(const NormMaps<Norm>& maps, const SearchInterval& interval, double scale,
                      int half, double* all_bins, ErrorSearch<Norm>* global,
                      ErrorSearchShared<Norm>& shared) {
  const int64_t places = maps.batch * maps.mb * maps.nb;
  const int64_t threads = static_cast<int64_t>(gridDim.x) * blockDim.x;
  const int shift = interval.shift();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
  double* const bins = all_bins + threadIdx.x;
  double squares[kLossBins] = {};
  Sweep keys{{}, Bits<Norm>::kInfinity, 0, Bits<Norm>::kInfinity};
  for (int64_t place = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; place < places;
       place += threads) {
#pragma unroll
    for (int i = 0; i < kLossBins; ++i) bins[i * blockDim.x] = 0;
    double lost = 0;
    add_losses(maps, place, interval, shift, bins, lost, keys);
#pragma unroll
    for (int i = 0; i < kLossBins; ++i) {
      lost = __dadd_ru(lost, bins[i * blockDim.x]);
      const double scaled = __dmul_ru(lost, scale);
      squares[i] = __fma_ru(scaled, scaled, squares[i]);
    }
  }

  // Sums over the thread block: each warp adds up some of the bins.
#pragma unroll
  for (int i = 0; i < kLossBins; ++i) bins[i * blockDim.x] = squares[i];
  keys.include_lanes();
  if (lane == 0) {
    shared.warps[warp].least = keys.least;
    shared.warps[warp].most = keys.most;
    shared.warps[warp].next = keys.next;
  }
  __syncthreads();
  const auto sum_lanes = [](double sum) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      sum = __dadd_ru(sum, __shfl_xor_sync(~0u, sum, distance));
    }
    return sum;
  };
  for (int i = warp; i < kLossBins; i += warps) {
    double sum = 0;
    for (int t = lane; t < blockDim.x; t += 32) sum = __dadd_ru(sum, all_bins[i * blockDim.x + t]);
    sum = sum_lanes(sum);
    if (lane != 0) continue;
    if constexpr (kGrid) {
      global->squares[half][i][blockIdx.x] = sum;
    } else {
      shared.total.squares[i] = sum;
    }
  }
  if (threadIdx.x == 0) {
    for (int w = 1; w < warps; ++w) {
      keys.include(shared.warps[w].least, shared.warps[w].most, shared.warps[w].next);
    }
    if constexpr (kGrid) {
      global->least[half][blockIdx.x] = keys.least;
      global->most[half][blockIdx.x] = keys.most;
      global->next[half][blockIdx.x] = keys.next;
    } else {
      shared.total.least = keys.least;
      shared.total.most = keys.most;
      shared.total.next = keys.next;
    }
  }

  // Every thread block adds up what all have found, so that all go on alike.
  if constexpr (kGrid) {
    Meeting<true> meeting;
    meeting.arrive();
    meeting.wait();
    for (int i = warp; i < kLossBins; i += warps) {
      double sum = 0;
      for (int t = lane; t < gridDim.x; t += 32) {
        sum = __dadd_ru(sum, global->squares[half][i][t]);
      }
      sum = sum_lanes(sum);
      if (lane == 0) shared.total.squares[i] = sum;
    }
    if (warp == 0) {
      Sweep all{{}, Bits<Norm>::kInfinity, 0, Bits<Norm>::kInfinity};
      for (int t = lane; t < gridDim.x; t += 32) {
        all.include(global->least[half][t], global->most[half][t], global->next[half][t]);
      }
      all.include_lanes();
      if (lane == 0) {
        shared.total.least = all.least;
        shared.total.most = all.most;
        shared.total.next = all.next;
      }
    }
  }
  __syncthreads();
}

// `bins` doubles for all threads follow ErrorSearchShared in dynamic shared memory. kGrid: the
// launch is cooperative and has up to kMostSearchBlocks thread blocks; if not, one, and `global` is
// unused.
template <bool kGrid, class Norm>
__global__ void __launch_bounds__(kMostSearchThreads, 1)
    find_tau_for_error(const __grid_constant__ NormMaps<Norm> maps, double max_error,
                       ErrorSearch<Norm>* global, Norm* tau) {
  extern __shared__ __align__(16) unsigned char memory[];
  auto& shared = *reinterpret_cast<ErrorSearchShared<Norm>*>(memory);
  auto* const bins = reinterpret_cast<double*>(memory + sizeof(ErrorSearchShared<Norm>));
  let_next_kernel_start();
  wait_for_previous_kernel();

  double norms[2];
  sum_norms<kGrid>(maps, global, shared, norms);
  const double limit = largest_bound<Norm>(max_error, norms[0], norms[1]);
  SearchKey found = 0;
  if (isfinite(limit)) {  // else no threshold above 0 is allowed
    const SearchLimit<Norm> start(maps, limit);
    SearchInterval interval = start.interval;
    // At `low` the bound is within the limit. At `end` it is not, but perhaps before the first
    // sweep.
    for (int half = 0;; half ^= 1) {
      sweep<kGrid>(maps, interval, start.scale, half, bins, global, shared);
      const Sweep& total = shared.total;
      int bin = 0;
      while (bin < kLossBins && total.squares[bin] <= start.most_square) ++bin;
      if (bin == kLossBins) {
        found = total.next;
        break;
      }
      const int shift = interval.shift();
      const SearchKey low = interval.low + (SearchKey{static_cast<unsigned>(bin)} << shift);
      interval = {max(low, total.least),
                  min(min(low + (SearchKey{1} << shift), interval.end), total.most + 1)};
      found = interval.low;
      if (interval.end <= interval.low + 1) break;
      __syncthreads();  // before the next sweep writes to shared.total
    }
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    *tau = Bits<Norm>::to(static_cast<typename Bits<Norm>::Type>(found));
  }
}

}  // namespace spamm::kernels
