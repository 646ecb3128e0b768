// The threshold for a valid ratio, found exactly on the device. (The paper bisects on the ratio.)
//
// For one k the products of a column of A's map with a row of B's are a staircase once the row is
// sorted: rounding keeps order, so the products of one norm of A that lie in an interval are found
// by two binary searches. A warp sorts 64 norms of a row in registers and keeps them in shared
// memory; from then on counting costs 7 steps where it took 64 products.
//
// A sample of the products, the same in all thread blocks, gives an interval that holds the product
// of the wanted rank, counted from the largest, nearly for certain. One pass counts exactly what is
// above the interval and how the products inside fall into some bins; thread blocks join their
// counts and come to the same conclusion: the bin of the wanted product. (Where the sample has
// misled them, the interval above or below is next; where a bin is too full, the bin.) The products
// of that bin are then collected, and one thread block finds the wanted one among them, and with it
// the number of products above and equal to it: the two reachable counts next to the target. Where
// the lower one is nearer, as only ties make it, the product's successor is the threshold. The
// order of atomics does not matter to counts; these are 64 bits wide where 32 could run over.
//
// One launch: a single thread block for small maps, else a cooperative grid.
#pragma once

#include <cooperative_groups.h>

#include <cstdint>
#include <utility>

#include "kernels/common/overlap.cuh"
#include "kernels/threshold/norm_products.cuh"

namespace spamm::kernels {

constexpr int kSelectEdge = 64;  // norms of B in a staircase
constexpr int kSelectRun = 2;    // staircases side by side along K that one thread block takes
// One thread block fills a multiprocessor, so that as few as possible join their counts.
template <class Norm>
constexpr int kSelectThreads = sizeof(Norm) == 4 ? 1024 : 512;
template <class Norm>
constexpr int kSelectWarps = kSelectThreads<Norm> / 32;
template <class Norm>
constexpr int kBins = kSelectThreads<Norm>;
constexpr int kCandidates = 4096;
// For one thread block, so that its own counts fit 32 bits.
constexpr int kMostStaircases = (1 << 20) - 1024;

template <int kLaneRows, class Norm>
__host__ __device__ int64_t staircases(const NormMaps<Norm>& maps) {
  return maps.batch * ((maps.mb - 1) / (32 * kLaneRows) + 1) * ((maps.nb - 1) / kSelectEdge + 1) *
         maps.kb;
}

// Magnitudes of norms: A's as they lie, B's sorted. In shared memory, for each warp as many as it
// keeps. Each lane has kLaneRows norms of A: one where warps are plenty, else two, since what they
// meet is then sorted half as often.
template <class Norm, int kLaneRows>
struct Staircase {
  typename Bits<Norm>::Type a[32 * kLaneRows], b[kSelectEdge];
  int rows, columns;  // of which exist
};

// Counts that thread blocks tell each other. Count is wide enough for the number of products.
template <class Norm, class Count>
struct Selection {
  using Key = typename Bits<Norm>::Type;
  // Rounds take turns: one is read while the next one is counted and a third is made zero. The last
  // entry counts what is above a round's interval.
  Count counts[3][kBins<Norm> + 1];
  unsigned collected;
  Key successor_complement;  // of the least key above the collected ones
  Key candidates[kCandidates];

  // By one thread block, for the first round.
  __device__ void clear() {
    clear_counts(0);
    if (threadIdx.x == 0) collected = 0, successor_complement = 0;
  }
  __device__ void clear_counts(int round) {
    for (int i = threadIdx.x; i <= kBins<Norm>; i += blockDim.x) counts[round % 3][i] = 0;
  }
};

// Where the thread blocks of a launch wait for each other: all threads arrive, then wait.
template <bool kGrid>
struct Meeting {
  __device__ void arrive() {}
  __device__ void wait() { __syncthreads(); }
};
template <>
struct Meeting<true> {
  cooperative_groups::grid_group::arrival_token token{};
  __device__ void arrive() { token = cooperative_groups::this_grid().barrier_arrive(); }
  __device__ void wait() { cooperative_groups::this_grid().barrier_wait(std::move(token)); }
};

// A thread block's shared memory, before the staircases.
template <class Norm>
struct SelectShared {
  using Key = typename Bits<Norm>::Type;
  unsigned counts[kBins<Norm> + 1];
  unsigned collected;
  Key successor;
  Key staged[kCandidates];
};
template <class Norm, int kLaneRows>
constexpr int kStaircaseBytes = kSelectWarps<Norm> *
                                sizeof(Staircase<Norm, kLaneRows>);  // one for each warp
template <class Norm>
constexpr int kSelectSharedBytes = (sizeof(SelectShared<Norm>) + 15) / 16 * 16;

// Products that no threshold skips, NaN and infinity, are one value, the largest.
template <class Norm>
__device__ typename Bits<Norm>::Type product_key(Norm a, Norm b) {
  return min(Bits<Norm>::of_magnitude(norm_product(a, b)), Bits<Norm>::kInfinity);
}

// The least of a warp's values; of their complements, the complement of the greatest.
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

// Keys from low to high, both included, cut into bins of 2^shift() keys.
template <class Norm>
struct KeyInterval {
  using Key = typename Bits<Norm>::Type;
  Key low, high;

  __device__ int shift() const {
    constexpr int kLog2Bins = sizeof(Norm) == 4 ? 10 : 9;
    static_assert(kBins<Norm> == 1 << kLog2Bins);
    const auto width = static_cast<unsigned long long>(high - low);
    return max(64 - __clzll(static_cast<long long>(width)) - kLog2Bins, 0);
  }
  __device__ bool has(Key key) const { return key >= low && key <= high; }
  __device__ KeyInterval bin(int number) const {
    const Key first = low + (static_cast<Key>(number) << shift());
    return {first, min(high, first + ((Key{1} << shift()) - 1))};
  }
};

// Sorts 64 keys, two in each lane: key 2 * lane + i in keys[i].
template <class Key>
__device__ void sort_warp(Key (&keys)[2]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int run = 1; run <= 32; run *= 2) {  // lanes that are in order afterwards
    const bool ascends = run == 32 || (lane & run) == 0;
#pragma unroll
    for (int distance = run / 2; distance > 0; distance /= 2) {
      const bool takes_less = ((lane & distance) == 0) == ascends;
#pragma unroll
      for (Key& key : keys) {
        const Key other = __shfl_xor_sync(~0u, key, distance);
        key = takes_less ? min(key, other) : max(key, other);
      }
    }
    const Key less = min(keys[0], keys[1]), more = max(keys[0], keys[1]);
    keys[0] = ascends ? less : more;
    keys[1] = ascends ? more : less;
  }
}

// A lane's norms of A, and the sorted row of B's map that each of them meets.
template <class Norm, int kLaneRows>
struct StairRows {
  using Key = typename Bits<Norm>::Type;
  const Key* b;
  Norm a[kLaneRows];
  int columns[kLaneRows];  // 0 for a norm that does not exist

  __device__ explicit StairRows(const Staircase<Norm, kLaneRows>& stairs) : b(stairs.b) {
#pragma unroll
    for (int r = 0; r < kLaneRows; ++r) {
      const int row = threadIdx.x % 32 + 32 * r;
      a[r] = Bits<Norm>::to(stairs.a[row]);
      columns[r] = row < stairs.rows ? stairs.columns : 0;
    }
  }

  __device__ Key key(int r, int column) const {
    return product_key(a[r], Bits<Norm>::to(b[column]));
  }

  // The columns [begin, end) whose products lie in an interval. All searches go side by side: each
  // is a chain of waits. What pads a row of B makes the largest key, so that it comes last.
  __device__ void find(const KeyInterval<Norm>& interval, int (&begin)[kLaneRows],
                       int (&end)[kLaneRows]) const {
#pragma unroll
    for (int r = 0; r < kLaneRows; ++r) begin[r] = end[r] = 0;
#pragma unroll
    for (int step = kSelectEdge / 2; step > 0; step /= 2) {
#pragma unroll
      for (int r = 0; r < kLaneRows; ++r) {
        begin[r] += key(r, begin[r] + step - 1) < interval.low ? step : 0;
        end[r] += key(r, end[r] + step - 1) <= interval.high ? step : 0;
      }
    }
#pragma unroll
    for (int r = 0; r < kLaneRows; ++r) {
      begin[r] = min(begin[r] + (key(r, begin[r]) < interval.low), columns[r]);
      end[r] = min(end[r] + (key(r, end[r]) <= interval.high), columns[r]);
    }
  }
};

// All products, spread over the warps of the launch as staircases.
template <class Norm, int kLaneRows>
class Staircases {
 public:
  using Key = typename Bits<Norm>::Type;

  // `kept`: how many each warp has room for in `memory`.
  __device__ Staircases(const NormMaps<Norm>& maps, Staircase<Norm, kLaneRows>* memory, int kept)
      : maps_(maps),
        memory_(memory),
        kept_(kept),
        total_(static_cast<unsigned>(staircases<kLaneRows>(maps))) {
    for (int turn = 0; turn < kept && number(turn) < total_; ++turn) load(turn, turn);
    __syncwarp();
  }

  // Calls visit(rows) for each staircase, with a lane's part of it.
  template <class Visit>
  __device__ void for_each(const Visit& visit) const {
    for (int turn = 0; number(turn) < total_; ++turn) {
      // The last place serves all turns that have none of their own.
      const int at = min(turn, kept_ - 1);
      if (at == kept_ - 1 && number(kept_) < total_) {
        __syncwarp();
        load(turn, at);
        __syncwarp();
      }
      visit(StairRows<Norm, kLaneRows>(place(at)));
    }
  }

 private:
  static constexpr int kRows = 32 * kLaneRows;

  // Of one staircase in the maps.
  struct Corner {
    int64_t batch;
    int row, column, k, rows, columns;

    __device__ Corner(const NormMaps<Norm>& maps, unsigned number) {
      const unsigned row_tiles = (maps.mb - 1) / kRows + 1;
      const unsigned column_tiles = (maps.nb - 1) / kSelectEdge + 1;
      const unsigned tile = number / maps.kb, tile_row = tile / column_tiles;
      k = static_cast<int>(number - tile * maps.kb);
      column = static_cast<int>(tile - tile_row * column_tiles) * kSelectEdge;
      batch = tile_row / row_tiles;
      row = static_cast<int>(tile_row % row_tiles) * kRows;
      rows = min(kRows, maps.mb - row);
      columns = min(kSelectEdge, maps.nb - column);
    }
  };

  // Neighbours along K share the memory sectors of A, so a thread block takes some of them; more
  // would give all work to a few.
  __device__ unsigned number(int turn) const {
    const unsigned own = turn * kSelectWarps<Norm> + threadIdx.x / 32;
    return (own / kSelectRun * gridDim.x + blockIdx.x) * kSelectRun + own % kSelectRun;
  }

  __device__ Staircase<Norm, kLaneRows>& place(int at) const {
    return memory_[at * kSelectWarps<Norm> + threadIdx.x / 32];
  }

  __device__ void load(int turn, int at) const {
    const Corner corner(maps_, number(turn));
    const int lane = threadIdx.x % 32;
    Staircase<Norm, kLaneRows>& stairs = place(at);
    const Norm* const a = maps_.a + (corner.batch * maps_.mb + corner.row) * maps_.kb + corner.k;
    const Norm* const b = maps_.b + (corner.batch * maps_.kb + corner.k) * maps_.nb + corner.column;
    Key keys[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int index = lane + 32 * i;
      keys[i] = index < corner.columns ? Bits<Norm>::of_magnitude(b[index]) : ~Key{0};
    }
#pragma unroll
    for (int r = 0; r < kLaneRows; ++r) {
      const int index = lane + 32 * r;
      stairs.a[index] =
          Bits<Norm>::of_magnitude(a[static_cast<int64_t>(min(index, corner.rows - 1)) * maps_.kb]);
    }
    sort_warp(keys);
    stairs.b[2 * lane] = keys[0], stairs.b[2 * lane + 1] = keys[1];
    if (lane == 0) stairs.rows = corner.rows, stairs.columns = corner.columns;
  }

  const NormMaps<Norm>& maps_;
  Staircase<Norm, kLaneRows>* memory_;
  int kept_;
  unsigned total_;
};

// Counts this thread block's products in the bins of an interval, and those above it.
template <class Norm, int kLaneRows>
__device__ void count_bins(const Staircases<Norm, kLaneRows>& stairs,
                           const KeyInterval<Norm>& interval, unsigned (&counts)[kBins<Norm> + 1]) {
  using Key = typename Bits<Norm>::Type;
  constexpr int kAhead = 4;
  for (int i = threadIdx.x; i <= kBins<Norm>; i += blockDim.x) counts[i] = 0;
  __syncthreads();
  const int shift = interval.shift();
  unsigned above = 0;
  stairs.for_each([&](const StairRows<Norm, kLaneRows>& rows) {
    int begin[kLaneRows], end[kLaneRows], longest = 0;
    rows.find(interval, begin, end);
#pragma unroll
    for (int r = 0; r < kLaneRows; ++r) {
      above += rows.columns[r] - end[r];
      longest = max(longest, end[r] - begin[r]);
    }
    for (int offset = 0; offset < longest; offset += kAhead) {
      Key keys[kLaneRows][kAhead];
#pragma unroll
      for (int r = 0; r < kLaneRows; ++r) {
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
          keys[r][i] = rows.key(r, min(begin[r] + offset + i, kSelectEdge - 1));
        }
      }
#pragma unroll
      for (int r = 0; r < kLaneRows; ++r) {
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
          if (begin[r] + offset + i < end[r]) {
            atomicAdd(&counts[(keys[r][i] - interval.low) >> shift], 1u);
          }
        }
      }
    }
  });
  above = __reduce_add_sync(~0u, above);
  if (threadIdx.x % 32 == 0) atomicAdd(&counts[kBins<Norm>], above);
  __syncthreads();
}

// Puts this thread block's keys in an interval of more than one key into `shared.staged`, where
// there is room for them, and the least key above the interval into `shared.successor`.
template <class Norm, int kLaneRows>
__device__ void collect(const Staircases<Norm, kLaneRows>& stairs,
                        const KeyInterval<Norm>& interval, SelectShared<Norm>& shared) {
  using Key = typename Bits<Norm>::Type;
  if (threadIdx.x == 0) shared.collected = 0, shared.successor = Bits<Norm>::kInfinity;
  __syncthreads();
  Key successor = Bits<Norm>::kInfinity;
  stairs.for_each([&](const StairRows<Norm, kLaneRows>& rows) {
    int begin[kLaneRows], end[kLaneRows];
    rows.find(interval, begin, end);
#pragma unroll
    for (int r = 0; r < kLaneRows; ++r) {
      if (end[r] < rows.columns[r]) successor = min(successor, rows.key(r, end[r]));
      if (interval.low == interval.high || begin[r] == end[r]) continue;
      unsigned at = atomicAdd(&shared.collected, end[r] - begin[r]);
      for (int i = begin[r]; i < end[r]; ++i) shared.staged[at++] = rows.key(r, i);
    }
  });
  successor = least_in_warp(successor);
  if (threadIdx.x % 32 == 0) atomicMin(&shared.successor, successor);
  __syncthreads();
}

// The sum of `x` over the threads before this one.
template <class Norm, class Count>
__device__ Count sum_before(Count x) {
  __shared__ Count warp_sums[kSelectWarps<Norm>];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  Count through = x;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const Count below = __shfl_up_sync(~0u, through, distance);
    if (lane >= distance) through += below;
  }
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

// What a round has found. All threads of a thread block know it.
template <class Count>
struct FoundBin {
  static constexpr int kNone = -1;
  int bin;
  Count above, here;  // products in higher bins or above the interval, and in the bin
};

// The bin in which the running count, from `above` on and from the highest bin down, reaches
// `rank`: none where it is outside the interval.
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

// Ranks in a sample of a product for each thread, between which the wanted one is nearly for
// certain.
struct SampleRanks {
  int first, last;
};

// The interval between two products of a sample, or to the end of all keys where a rank is not in
// it. The sample steps through the maps as evenly as the fractions of irrational numbers do.
template <class Norm>
__device__ KeyInterval<Norm> sample_interval(const NormMaps<Norm>& maps, const SampleRanks& ranks,
                                             SelectShared<Norm>& shared) {
  using Key = typename Bits<Norm>::Type;
  __shared__ Key least, greatest, low, high;
  const auto pick = [](unsigned step, int extent) {
    return static_cast<int>(__umulhi((threadIdx.x + 1) * step, static_cast<unsigned>(extent)));
  };
  const int64_t batch = pick(2313256921u, static_cast<int>(maps.batch));
  const int i = pick(3679390609u, maps.mb), k = pick(3152041523u, maps.kb);
  const int j = pick(2700274806u, maps.nb);
  const Key key = product_key(maps.a[(batch * maps.mb + i) * maps.kb + k],
                              maps.b[(batch * maps.kb + k) * maps.nb + j]);
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

// `target` is the wanted count of products, `rank` the nearest number from 1 on. kGrid: of more
// than one thread block, launched cooperatively; else `global` is not used. `kept`: see Staircases.
template <bool kGrid, int kLaneRows, class Norm, class Count>
__global__ void __launch_bounds__(kSelectThreads<Norm>, 1)
    select_tau(const __grid_constant__ NormMaps<Norm> maps, Selection<Norm, Count>* global,
               Count rank, double target, SampleRanks sample, int kept, Norm* tau) {
  extern __shared__ __align__(16) unsigned char memory[];
  auto& shared = *reinterpret_cast<SelectShared<Norm>*>(memory);
  let_next_kernel_start();
  // The workspace may have been memory of the kernel before.
  wait_for_previous_kernel();

  // The workspace is clear once all thread blocks have got here; they sample and sort meanwhile.
  if (kGrid && blockIdx.x == 0) global->clear();
  Meeting<kGrid> meeting;
  meeting.arrive();
  using Kept = Staircase<Norm, kLaneRows>;
  const Staircases<Norm, kLaneRows> stairs(
      maps, reinterpret_cast<Kept*>(memory + kSelectSharedBytes<Norm>), kept);
  KeyInterval<Norm> interval = sample_interval(maps, sample, shared);
  meeting.wait();

  FoundBin<Count> found;
  for (int round = 0;; ++round) {
    count_bins(stairs, interval, shared.counts);
    if constexpr (kGrid) {
      Count* const counts = global->counts[round % 3];
      for (int i = threadIdx.x; i <= kBins<Norm>; i += blockDim.x) {
        if (shared.counts[i] != 0) atomicAdd(counts + i, shared.counts[i]);
      }
      if (blockIdx.x == 0) global->clear_counts(round + 1);
      meeting.arrive();
      meeting.wait();
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

  // The candidates are all the keys of the interval, if that has more than one.
  collect(stairs, interval, shared);
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
    meeting.arrive();
    meeting.wait();
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

}  // namespace spamm::kernels
