// The tau of a valid ratio, found exactly on the device: the product of norms whose rank, counted
// from the largest, is the wanted number of products. Design: docs/kernels/norm_map.md.
//
// A sample gives an interval that most likely holds the product. A round counts the products above
// the interval and in its bins; all thread blocks add up their counts and choose the same bin. The
// products of that bin are collected, and one thread block selects among them. If ties make the
// count without the product nearer to the target, tau is the next larger product.
// One launch: a single thread block for small maps, else a cooperative grid.
#pragma once

#include <cmath>
#include <cstdint>

#include "kernels/common/overlap.cuh"
#include "kernels/threshold/norm_products.cuh"
#include "kernels/threshold/staircases.cuh"

namespace spamm::kernels {

constexpr int kCandidates = 4096;

// The counts of all thread blocks together. Count is wide enough for the number of products.
template <class Norm, class Count>
struct Selection {
  using Key = typename Bits<Norm>::Type;
  // Rounds use the three arrays in turn: one is read while the next is counted and the third is set
  // to zero. The last entry of an array counts the products above the round's interval.
  Count counts[3][kBins<Norm> + 1];
  unsigned collected;
  Key successor_complement;  // the complement of the least key above the collected ones
  Key candidates[kCandidates];

  // Called by one thread block before the first round.
  __device__ void clear() {
    clear_counts(0);
    if (threadIdx.x == 0) collected = 0, successor_complement = 0;
  }
  __device__ void clear_counts(int round) {
    for (int i = threadIdx.x; i <= kBins<Norm>; i += blockDim.x) counts[round % 3][i] = 0;
  }
};

// The shared memory of a thread block. The staircases follow it.
template <class Norm>
struct SelectShared {
  using Key = typename Bits<Norm>::Type;
  unsigned counts[kBins<Norm> + 1];
  unsigned collected;
  Key successor;
  Key staged[kCandidates];
};
template <class Norm>
constexpr int kSelectSharedBytes = (sizeof(SelectShared<Norm>) + 15) / 16 * 16;

// The least value of a warp. Applied to complements it gives the complement of the greatest value.
template <class Key>
__device__ Key least_in_warp(Key x) {
  if constexpr (sizeof(Key) == 4) {
    return __reduce_min_sync(~0u, x);
  } else {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      x = min(x, __shfl_xor_sync(~0u, x, distance));
    }
    return x;
  }
}

template <class Norm>
__device__ void start_collecting(SelectShared<Norm>& shared) {
  if (threadIdx.x == 0) shared.collected = 0, shared.successor = Bits<Norm>::kInfinity;
  __syncthreads();
}
template <class Norm>
__device__ void include_successor(typename Bits<Norm>::Type successor, SelectShared<Norm>& shared) {
  successor = least_in_warp(successor);
  if (threadIdx.x % 32 == 0) atomicMin(&shared.successor, successor);
  __syncthreads();
}

// Stores the keys of this thread block's products in the interval into `shared.staged`, unless the
// interval is a single key. Stores the least key above the interval into `shared.successor`.
template <class Norm>
__device__ void collect(const Staircases<Norm>& stairs, const KeyInterval<Norm>& interval,
                        SelectShared<Norm>& shared) {
  using Key = typename Bits<Norm>::Type;
  start_collecting(shared);
  Key successor = Bits<Norm>::kInfinity;
  stairs.for_each([&](const StairRow<Norm>& row) {
    int begin, end;
    row.find(interval, begin, end);
    if (end < row.columns) successor = min(successor, row.key(end));
    if (interval.low == interval.high || begin == end) return;
    unsigned at = atomicAdd(&shared.collected, end - begin);
    for (int i = begin; i < end; ++i) shared.staged[at++] = row.key(i);
  });
  include_successor(successor, shared);
}

// The sum of `x` over the lower-numbered threads.
template <class Norm, class Count>
__device__ Count sum_before(Count x) {
  __shared__ Count warp_sums[kSelectWarps<Norm>];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Count through = sum_through(x);
  if (lane == 31) warp_sums[warp] = through;
  __syncthreads();
  Count earlier = lane < warp ? warp_sums[lane] : 0;
  if constexpr (sizeof(Count) == 4) {
    earlier = __reduce_add_sync(~0u, earlier);
  } else {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      earlier += __shfl_xor_sync(~0u, earlier, distance);
    }
  }
  return earlier + through - x;
}

// The result of a round. All threads of a thread block have it.
template <class Count>
struct FoundBin {
  static constexpr int kNone = -1;
  int bin;
  Count above, here;  // products above the bin, and in the bin
};

// Finds the bin of the product of rank `rank`: starting with `above`, counts are added from the
// highest bin down until they reach `rank`. There is none if the product is outside the interval.
template <class Norm, class Count, class BinCount>
__device__ FoundBin<Count> find_bin(Count above, const BinCount* counts, Count rank) {
  __shared__ FoundBin<Count> found;
  const int bin = kBins<Norm> - 1 - threadIdx.x;
  const Count own = counts[bin];
  if (threadIdx.x == 0) found = {FoundBin<Count>::kNone, above, 0};
  const Count before = above + sum_before<Norm>(own);  // a barrier
  if (before < rank && rank <= before + own) found = {bin, before, own};
  __syncthreads();
  const FoundBin<Count> result = found;
  __syncthreads();
  return result;
}

// Two ranks in the sample. The wanted product most likely lies between the products of these ranks.
struct SampleRanks {
  int first, last;

  // If `share` of all products come before a product in order: its expected rank in a sample of
  // `size`, plus and minus two standard deviations. A wider interval would cost time in every
  // search. A miss costs one more round.
  __host__ __device__ static SampleRanks of(double share, int size) {
    const double place = size * share, slack = 2 * std::sqrt(place * (1 - share)) + 1;
    return {static_cast<int>(std::floor(place - slack)),
            static_cast<int>(std::ceil(place + slack))};
  }
};

// Sample points are multiples of irrational fractions of extents, which cover them evenly.
__device__ inline int pick(unsigned step, int extent) {
  return static_cast<int>(__umulhi((threadIdx.x + 1) * step, static_cast<unsigned>(extent)));
}

template <class Norm>
__device__ typename Bits<Norm>::Type sample_key(const NormMaps<Norm>& maps) {
  const int64_t batch = pick(2313256921u, static_cast<int>(maps.batch));
  const int i = pick(3679390609u, maps.mb), k = pick(3152041523u, maps.kb);
  const int j = pick(2700274806u, maps.nb);
  return product_key(maps.a[(batch * maps.mb + i) * maps.kb + k],
                     maps.b[(batch * maps.kb + k) * maps.nb + j]);
}

// The interval between two ranks of a sample with one product, `key`, for each thread. It extends
// to the first or last key if a rank is not in the sample.
template <class Norm>
__device__ KeyInterval<Norm> sample_interval(typename Bits<Norm>::Type key,
                                             const SampleRanks& ranks, SelectShared<Norm>& shared) {
  using Key = typename Bits<Norm>::Type;
  __shared__ Key least, greatest, low, high;
  shared.counts[threadIdx.x] = 0;
  if (threadIdx.x == 0) {
    least = high = Bits<Norm>::kInfinity;
    greatest = low = 0;
  }
  __syncthreads();
  const Key warp_least = least_in_warp(key), warp_greatest = ~least_in_warp(~key);
  if (threadIdx.x % 32 == 0) {
    atomicMin(&least, warp_least);
    atomicMax(&greatest, warp_greatest);
  }
  __syncthreads();
  const KeyInterval<Norm> all{least, greatest};
  atomicAdd(&shared.counts[(key - all.low) >> all.shift()], 1u);
  __syncthreads();

  const int bin = kBins<Norm> - 1 - threadIdx.x;
  const int own = static_cast<int>(shared.counts[bin]);
  const int before = static_cast<int>(sum_before<Norm>(shared.counts[bin]));
  if (before < ranks.first && ranks.first <= before + own) high = all.bin(bin).high;
  if (before < ranks.last && ranks.last <= before + own) low = all.bin(bin).low;
  __syncthreads();
  return {low, high};
}

// Finds tau among `products`, for which count_bins() and collect() exist, from an interval that
// most likely holds it. `global` is clear. See select_tau().
template <bool kGrid, class Products, class Norm, class Count>
__device__ void select_among(const Products& products, KeyInterval<Norm> interval,
                             Selection<Norm, Count>* global, Count rank, double target,
                             SelectShared<Norm>& shared, Norm* tau) {
  FoundBin<Count> found;
  for (int round = 0;; ++round) {
    count_bins(products, interval, interval.shift(), kBins<Norm>, shared.counts);
    if constexpr (kGrid) {
      Count* const counts = global->counts[round % 3];
      for (int i = threadIdx.x; i <= kBins<Norm>; i += blockDim.x) {
        if (shared.counts[i] != 0) atomicAdd(counts + i, shared.counts[i]);
      }
      if (blockIdx.x == 0) global->clear_counts(round + 1);
      meet();
      found = find_bin<Norm>(counts[kBins<Norm>], counts, rank);
    } else {
      found = find_bin<Norm>(shared.counts[kBins<Norm>], shared.counts, rank);
    }
    if (found.bin != FoundBin<Count>::kNone) {
      interval = interval.bin(found.bin);
      if (found.here <= kCandidates || interval.low == interval.high) break;
    } else if (rank <= found.above) {
      interval = {interval.high + 1, Bits<Norm>::kInfinity};
    } else {
      interval = {0, interval.low - 1};
    }
  }

  // Collects all keys of the interval, unless it is a single key.
  collect(products, interval, shared);
  if constexpr (kGrid) {
    __shared__ unsigned first;
    if (threadIdx.x == 0) {
      first = atomicAdd(&global->collected, shared.collected);
      atomicMax(&global->successor_complement, ~shared.successor);
    }
    __syncthreads();
    for (unsigned i = threadIdx.x; i < shared.collected; i += blockDim.x) {
      global->candidates[first + i] = shared.staged[i];
    }
    meet();
    if (blockIdx.x != 0) return;
    const unsigned collected = global->collected;
    for (unsigned i = threadIdx.x; i < collected; i += blockDim.x) {
      shared.staged[i] = global->candidates[i];
    }
    if (threadIdx.x == 0) {
      shared.collected = collected;
      shared.successor = ~global->successor_complement;
    }
    __syncthreads();
  }
  while (interval.low != interval.high) {
    shared.counts[threadIdx.x] = 0;
    __syncthreads();
    const int shift = interval.shift();
    for (unsigned i = threadIdx.x; i < shared.collected; i += blockDim.x) {
      const auto key = shared.staged[i];
      if (interval.has(key)) atomicAdd(&shared.counts[(key - interval.low) >> shift], 1u);
    }
    __syncthreads();
    found = find_bin<Norm>(found.above, shared.counts, rank);
    interval = interval.bin(found.bin);
  }

  auto key = interval.low;
  const Count above = found.above, reached = above + found.here;
  const bool fewer_is_nearer =
      fabs(static_cast<double>(above) - target) < fabs(static_cast<double>(reached) - target);
  if (fewer_is_nearer && key != Bits<Norm>::kInfinity) {
    for (unsigned i = threadIdx.x; i < shared.collected; i += blockDim.x) {
      if (shared.staged[i] > key) atomicMin(&shared.successor, shared.staged[i]);
    }
    __syncthreads();
    key = above == 0 ? Bits<Norm>::kInfinity : shared.successor;
  }
  if (threadIdx.x == 0) *tau = Bits<Norm>::to(key);
}

// `target`: the wanted number of products. `rank`: the nearest whole number, at least 1. kGrid: the
// launch is cooperative, of several thread blocks; else `global` is unused. `kept`: see Staircases.
template <bool kGrid, class Norm, class Count>
__global__ void __launch_bounds__(kSelectThreads<Norm>, 1)
    select_tau(const __grid_constant__ NormMaps<Norm> maps, Selection<Norm, Count>* global,
               Count rank, double target, SampleRanks sample, int kept, Norm* tau) {
  extern __shared__ __align__(16) unsigned char memory[];
  auto& shared = *reinterpret_cast<SelectShared<Norm>*>(memory);
  let_next_kernel_start();
  // The workspace may be memory that the previous kernel still uses.
  wait_for_previous_kernel();

  // The thread blocks sample and sort while the workspace is cleared.
  if (kGrid && blockIdx.x == 0) global->clear();
  Meeting<kGrid> meeting;
  meeting.arrive();
  using Kept = Staircase<Norm>;
  const Staircases<Norm> stairs(maps, reinterpret_cast<Kept*>(memory + kSelectSharedBytes<Norm>),
                                kept);
  const KeyInterval<Norm> interval = sample_interval<Norm>(sample_key(maps), sample, shared);
  meeting.wait();
  select_among<kGrid>(stairs, interval, global, rank, target, shared, tau);
}

// ---- Products one by one ------------------------------------------------------------------------

// Counting and collecting for select_among(). The products' each_key(visit) calls visit(key) for
// each of them that the thread has.
template <class Products, class Norm>
__device__ void count_bins(const Products& products, const KeyInterval<Norm>& interval, int shift,
                           int bins, unsigned* counts) {
  for (int i = threadIdx.x; i <= bins; i += blockDim.x) counts[i] = 0;
  __syncthreads();
  unsigned above = 0;
  products.each_key([&](auto key) {
    if (key > interval.high) ++above;
    if (interval.has(key)) atomicAdd(&counts[(key - interval.low) >> shift], 1u);
  });
  above = __reduce_add_sync(~0u, above);
  if (threadIdx.x % 32 == 0) atomicAdd(&counts[bins], above);
  __syncthreads();
}

template <class Products, class Norm>
__device__ void collect(const Products& products, const KeyInterval<Norm>& interval,
                        SelectShared<Norm>& shared) {
  start_collecting(shared);
  auto successor = Bits<Norm>::kInfinity;
  products.each_key([&](auto key) {
    if (key > interval.high) successor = min(successor, key);
    if (interval.low == interval.high || !interval.has(key)) return;
    shared.staged[atomicAdd(&shared.collected, 1u)] = key;
  });
  include_successor(successor, shared);
}

}  // namespace spamm::kernels
