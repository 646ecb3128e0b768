// The products of two norm maps as staircases. A staircase is, for one k, the products of a column
// of A's map with a sorted row of B's. Rounding is monotone, so two binary searches find the
// products of one norm of A that lie in an interval.
//
// A warp sorts 64 norms of a row, kept in shared memory: a search takes 7 steps for 64 products.
#pragma once

#include <cstdint>

#include "kernels/threshold/norm_products.cuh"

namespace spamm::kernels {

constexpr int kSelectEdge = 64;  // norms of B in a staircase
constexpr int kSelectRun = 2;    // neighbouring staircases along K of one thread block
// One thread block fills a multiprocessor, so that few thread blocks have to add up their counts.
template <class Norm>
constexpr int kSelectThreads = sizeof(Norm) == 4 ? 1024 : 512;
template <class Norm>
constexpr int kSelectWarps = kSelectThreads<Norm> / 32;
template <class Norm>
constexpr int kBins = kSelectThreads<Norm>;

constexpr int kSelectRows = 32;  // norms of A: one for each lane

template <class Norm>
__host__ __device__ int64_t staircases(const NormMaps<Norm>& maps) {
  return maps.batch * ((maps.mb - 1) / kSelectRows + 1) * ((maps.nb - 1) / kSelectEdge + 1) *
         maps.kb;
}

// The magnitudes of A's norms in their order, and of B's norms sorted. In shared memory.
template <class Norm>
struct Staircase {
  typename Bits<Norm>::Type a[kSelectRows], b[kSelectEdge];
  int rows, columns;  // inside the maps
};

template <class Norm>
constexpr int kStaircaseBytes = kSelectWarps<Norm> * sizeof(Staircase<Norm>);  // one for each warp

// The keys from low to high, both included, in bins of 2^shift() keys.
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
  for (int run = 1; run <= 32; run *= 2) {  // groups of `run` lanes are sorted after this round
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

// A lane's norm of A, and the sorted row of B's map that it is multiplied with.
template <class Norm>
struct StairRow {
  using Key = typename Bits<Norm>::Type;
  const Key* b;
  Norm a;
  int columns;  // 0 for a norm outside the map

  __device__ explicit StairRow(const Staircase<Norm>& stairs)
      : b(stairs.b),
        a(Bits<Norm>::to(stairs.a[threadIdx.x % 32])),
        columns(threadIdx.x % 32 < stairs.rows ? stairs.columns : 0) {}

  __device__ Key key(int column) const { return product_key(a, Bits<Norm>::to(b[column])); }

  // Finds the columns [begin, end) whose products lie in an interval. Both searches run
  // interleaved, as each is a chain of dependent loads. Padding has the largest key.
  __device__ void find(const KeyInterval<Norm>& interval, int& begin, int& end) const {
    begin = end = 0;
#pragma unroll
    for (int step = kSelectEdge / 2; step > 0; step /= 2) {
      begin += key(begin + step - 1) < interval.low ? step : 0;
      end += key(end + step - 1) <= interval.high ? step : 0;
    }
    begin = min(begin + (key(begin) < interval.low), columns);
    end = min(end + (key(end) <= interval.high), columns);
  }
};

// All products as staircases, distributed over the warps of the launch.
template <class Norm>
class Staircases {
 public:
  using Key = typename Bits<Norm>::Type;

  // `kept`: the number of staircases that fit `memory` for each warp.
  __device__ Staircases(const NormMaps<Norm>& maps, Staircase<Norm>* memory, int kept)
      : maps_(maps), memory_(memory), kept_(kept), total_(static_cast<unsigned>(staircases(maps))) {
    for (int turn = 0; turn < kept && number(turn) < total_; ++turn) load(turn, turn);
    __syncwarp();
  }

  // Calls visit(row) for each staircase of this warp. `row` is the lane's part of it.
  template <class Visit>
  __device__ void for_each(const Visit& visit) const {
    for (int turn = 0; number(turn) < total_; ++turn) {
      // The staircases that do not fit share the last place and are sorted again in each pass.
      const int at = min(turn, kept_ - 1);
      if (at == kept_ - 1 && number(kept_) < total_) {
        __syncwarp();
        load(turn, at);
        __syncwarp();
      }
      visit(StairRow<Norm>(place(at)));
    }
  }

 private:
  // Neighbouring staircases along K share memory sectors of A, so a thread block gets kSelectRun of
  // them. With more, few thread blocks would have all the work of a small map.
  __device__ unsigned number(int turn) const {
    const unsigned own = turn * kSelectWarps<Norm> + threadIdx.x / 32;
    return (own / kSelectRun * gridDim.x + blockIdx.x) * kSelectRun + own % kSelectRun;
  }

  __device__ Staircase<Norm>& place(int at) const {
    return memory_[at * kSelectWarps<Norm> + threadIdx.x / 32];
  }

  __device__ void load(int turn, int at) const {
    const unsigned row_tiles = (maps_.mb - 1) / kSelectRows + 1;
    const unsigned column_tiles = (maps_.nb - 1) / kSelectEdge + 1;
    const unsigned tile = number(turn) / maps_.kb, tile_row = tile / column_tiles;
    const int k = static_cast<int>(number(turn) - tile * maps_.kb);
    const int column = static_cast<int>(tile - tile_row * column_tiles) * kSelectEdge;
    const int64_t batch = tile_row / row_tiles;
    const int row = static_cast<int>(tile_row % row_tiles) * kSelectRows;
    const int rows = min(kSelectRows, maps_.mb - row);
    const int columns = min(kSelectEdge, maps_.nb - column);
    const int lane = threadIdx.x % 32;
    Staircase<Norm>& stairs = place(at);
    const Norm* const a = maps_.a + (batch * maps_.mb + row) * maps_.kb + k;
    const Norm* const b = maps_.b + (batch * maps_.kb + k) * maps_.nb + column;
    Key keys[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int index = lane + 32 * i;
      keys[i] = index < columns ? Bits<Norm>::of_magnitude(b[index]) : ~Key{0};
    }
    stairs.a[lane] =
        Bits<Norm>::of_magnitude(a[static_cast<int64_t>(min(lane, rows - 1)) * maps_.kb]);
    sort_warp(keys);
    stairs.b[2 * lane] = keys[0], stairs.b[2 * lane + 1] = keys[1];
    if (lane == 0) stairs.rows = rows, stairs.columns = columns;
  }

  const NormMaps<Norm>& maps_;
  Staircase<Norm>* memory_;
  int kept_;
  unsigned total_;
};

// The most in a thread block, so that its own counts fit 32 bits.
constexpr int kMostStaircases = (1 << 21) - 2048;

// Counts this thread block's products in the bins of an interval, 2^shift keys each, and above the
// interval: `counts` has bins + 1 entries.
template <class Norm>
__device__ void count_bins(const Staircases<Norm>& stairs, const KeyInterval<Norm>& interval,
                           int shift, int bins, unsigned* counts) {
  using Key = typename Bits<Norm>::Type;
  constexpr int kAhead = 4;
  for (int i = threadIdx.x; i <= bins; i += blockDim.x) counts[i] = 0;
  __syncthreads();
  unsigned above = 0;
  stairs.for_each([&](const StairRow<Norm>& row) {
    int begin, end;
    row.find(interval, begin, end);
    above += row.columns - end;
    for (; begin < end; begin += kAhead) {
      Key keys[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) keys[i] = row.key(min(begin + i, kSelectEdge - 1));
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (begin + i < end) atomicAdd(&counts[(keys[i] - interval.low) >> shift], 1u);
      }
    }
  });
  above = __reduce_add_sync(~0u, above);
  if (threadIdx.x % 32 == 0) atomicAdd(&counts[bins], above);
  __syncthreads();
}

}  // namespace spamm::kernels
