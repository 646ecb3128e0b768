// The products of two norm maps as staircases. A staircase is, for one k, the products of a column
// of A's map with a sorted row of B's. Rounding is monotone, so two binary searches find the
// products of one norm of A that lie in an interval.
//
// A warp sorts 64 norms of a row in registers and keeps them in shared memory. A search then takes
// 7 steps instead of 64 products.
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

template <int kLaneRows, class Norm>
__host__ __device__ int64_t staircases(const NormMaps<Norm>& maps) {
  return maps.batch * ((maps.mb - 1) / (32 * kLaneRows) + 1) * ((maps.nb - 1) / kSelectEdge + 1) *
         maps.kb;
}

// The magnitudes of A's norms in their order, and of B's norms sorted. In shared memory. Each lane
// has kLaneRows norms of A: two if there are more staircases than warps, because each row of B then
// is sorted half as often; else one.
template <class Norm, int kLaneRows>
struct Staircase {
  typename Bits<Norm>::Type a[32 * kLaneRows], b[kSelectEdge];
  int rows, columns;  // inside the maps
};

template <class Norm, int kLaneRows>
constexpr int kStaircaseBytes = kSelectWarps<Norm> *
                                sizeof(Staircase<Norm, kLaneRows>);  // one for each warp

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

// A lane's norms of A, and the sorted row of B's map that they are multiplied with.
template <class Norm, int kLaneRows>
struct StairRows {
  using Key = typename Bits<Norm>::Type;
  const Key* b;
  Norm a[kLaneRows];
  int columns[kLaneRows];  // 0 for a norm outside the map

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

  // Finds the columns [begin, end) whose products lie in an interval. All searches run interleaved,
  // because each is a chain of dependent loads. Padding of a row has the largest key and comes
  // last.
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

// All products as staircases, distributed over the warps of the launch.
template <class Norm, int kLaneRows>
class Staircases {
 public:
  using Key = typename Bits<Norm>::Type;

  // `kept`: the number of staircases that fit `memory` for each warp.
  __device__ Staircases(const NormMaps<Norm>& maps, Staircase<Norm, kLaneRows>* memory, int kept)
      : maps_(maps),
        memory_(memory),
        kept_(kept),
        total_(static_cast<unsigned>(staircases<kLaneRows>(maps))) {
    for (int turn = 0; turn < kept && number(turn) < total_; ++turn) load(turn, turn);
    __syncwarp();
  }

  // Calls visit(rows) for each staircase of this warp. `rows` is the lane's part of it.
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
      visit(StairRows<Norm, kLaneRows>(place(at)));
    }
  }

 private:
  static constexpr int kRows = 32 * kLaneRows;

  // The place of a staircase in the maps.
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

  // Neighbouring staircases along K share memory sectors of A, so a thread block gets kSelectRun of
  // them. With more, few thread blocks would have all the work of a small map.
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

// The most in a thread block, so that its own counts fit 32 bits.
constexpr int kMostStaircases = (1 << 20) - 1024;

// Counts this thread block's products in the bins of an interval, 2^shift keys each, and above the
// interval: `counts` has bins + 1 entries.
template <class Norm, int kLaneRows>
__device__ void count_bins(const Staircases<Norm, kLaneRows>& stairs,
                           const KeyInterval<Norm>& interval, int shift, int bins,
                           unsigned* counts) {
  using Key = typename Bits<Norm>::Type;
  constexpr int kAhead = 4;
  for (int i = threadIdx.x; i <= bins; i += blockDim.x) counts[i] = 0;
  __syncthreads();
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
  if (threadIdx.x % 32 == 0) atomicAdd(&counts[bins], above);
  __syncthreads();
}

}  // namespace spamm::kernels
