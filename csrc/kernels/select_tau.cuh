// The threshold for a valid ratio, found exactly on the device: radix selection over the bit
// patterns of all norm products, recomputed in every pass. (The paper bisects on the ratio.)
//
// A pass counts, among the products whose higher bits are those found so far, each value of the
// next 11 bits; the value that holds the product of the wanted rank, counted from the largest, is
// found. After the last pass the product is known, and with it the number of products above and
// equal to it: the two reachable counts next to the target. Where the lower one is nearer, as only
// ties make it, one more pass looks for the product's successor. Products are met in groups, 32
// rows of A's map times 32 columns of B's for one k. Rounding keeps order, so the products of the
// least and of the greatest norms bound a group: where both ends agree, or the whole group lies
// elsewhere, its products are not even formed. In maps as smooth as those of decay matrices few
// groups are left. One launch, of a single thread block for small maps, else a cooperative one:
// thread blocks meet between the passes, and each of them reads the counts and comes to the same
// conclusion. Counts are 64 bits wide; the order of atomics does not matter to them.
#pragma once

#include <cooperative_groups.h>

#include <cstdint>
#include <utility>

#include "norm_products.cuh"
#include "overlap.cuh"

namespace spamm::kernels {

constexpr int kDigitBits = 11, kDigits = 1 << kDigitBits;
// One thread block fills a multiprocessor, so that as few as possible join their counts.
template <class Norm>
constexpr int kSelectThreads = sizeof(Norm) == 4 ? 1024 : 512;

template <class Norm>
struct Selection {
  static constexpr int kPasses = (Bits<Norm>::kCount + kDigitBits - 1) / kDigitBits;
  unsigned long long counts[kPasses][kDigits];
  typename Bits<Norm>::Type successor_complement;
};

// Products that no threshold skips, NaN and infinity, are one value, the largest.
template <class Norm>
__device__ typename Bits<Norm>::Type product_key(Norm a, Norm b) {
  return min(Bits<Norm>::of_magnitude(norm_product(a, b)), Bits<Norm>::kInfinity);
}

// The least and the greatest magnitude met; NaN counts as above infinity.
template <class Norm>
struct NormRange {
  using Key = typename Bits<Norm>::Type;
  Key least = ~Key{0}, greatest = 0;

  __device__ void add(Norm x) {
    const Key magnitude = Bits<Norm>::of_magnitude(x);
    least = min(least, magnitude);
    greatest = max(greatest, magnitude);
  }

  // Joins the ranges of a warp's lanes.
  __device__ void join_lanes() {
    if constexpr (sizeof(Key) == 4) {
      least = __reduce_min_sync(~0u, least);
      greatest = __reduce_max_sync(~0u, greatest);
    } else {
#pragma unroll
      for (int distance = 16; distance > 0; distance /= 2) {
        least = min(least, __shfl_xor_sync(~0u, least, distance));
        greatest = max(greatest, __shfl_xor_sync(~0u, greatest, distance));
      }
    }
  }
};

// Groups of products that warps take in turn.
template <class Norm>
__host__ __device__ int64_t select_groups(const NormMaps<Norm>& maps) {
  return patches(maps) * ((maps.kb - 1) / kBatch + 1);
}

// A group of products: 4 rows, a column in each lane, 4 values of k.
template <class Norm>
struct KeyGroup {
  using Key = typename Bits<Norm>::Type;
  static constexpr int kKeys = kBatch * kPatchRows;
  static constexpr Key kNone = ~Key{0};  // above all keys, in every digit

  Norm norm_a, norm_b[kBatch];  // of A one norm in each lane, for shuffles
  int rows, columns, depth;
  Key low, high;  // bounds of the keys of all lanes

  __device__ KeyGroup(const NormMaps<Norm>& maps, unsigned number) {
    const unsigned row_patches = (maps.mb - 1) / kPatchRows + 1;
    const unsigned column_patches = (maps.nb - 1) / kPatchColumns + 1;
    const unsigned depths = (maps.kb - 1) / kBatch + 1;
    const unsigned patch = number / depths, patch_row = patch / column_patches;
    const int64_t batch = patch_row / row_patches;
    const int k = (number - patch * depths) * kBatch;
    const int column = (patch - patch_row * column_patches) * kPatchColumns;
    const int row = patch_row % row_patches * kPatchRows;
    rows = min(kPatchRows, maps.mb - row);
    columns = min(kPatchColumns, maps.nb - column);
    depth = min(kBatch, maps.kb - k);

    // What lies past an edge is the last norm before it once more, which leaves the range as it is.
    const int lane = threadIdx.x % 32;
    const int a_row = row + min(lane / kBatch % kPatchRows, rows - 1);
    norm_a = maps.a[(batch * maps.mb + a_row) * maps.kb + k + min(lane % kBatch, depth - 1)];
    const Norm* const b =
        maps.b + (batch * maps.kb + k) * maps.nb + column + min(lane, columns - 1);
    NormRange<Norm> range_a, range_b;
    range_a.add(norm_a);
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      norm_b[i] = b[static_cast<int64_t>(min(i, depth - 1)) * maps.nb];
      range_b.add(norm_b[i]);
    }
    range_a.join_lanes();
    range_b.join_lanes();
    const auto key_of = [](Key x, Key y) {
      return product_key(Bits<Norm>::to(x), Bits<Norm>::to(y));
    };
    low = key_of(range_a.least, range_b.least);
    high = key_of(range_a.greatest, range_b.greatest);
  }

  __device__ int products() const { return rows * columns * depth; }

  // One of this lane's keys, kNone past an edge. All lanes call it together.
  __device__ Key key(int number) const {
    const int i = number / kPatchRows, r = number % kPatchRows;
    const bool exists = i < depth && r < rows && threadIdx.x % 32 < columns;
    const Norm a = __shfl_sync(~0u, norm_a, r * kBatch + i);
    return exists ? product_key(a, norm_b[i]) : kNone;
  }
};

// All products, spread over the grid. Each warp keeps the keys of its first group, which in maps of
// up to some 128 blocks a side is the only one.
template <class Norm>
class Keys {
 public:
  using Key = typename Bits<Norm>::Type;

  // There are fewer than 2^31 groups. Neighbouring ones go to different thread blocks: one of them
  // may be all work, the next none.
  __device__ explicit Keys(const NormMaps<Norm>& maps)
      : maps_(maps),
        groups_(static_cast<unsigned>(select_groups(maps))),
        first_(threadIdx.x / 32 * gridDim.x + blockIdx.x) {
    if (first_ >= groups_) return;
    const KeyGroup<Norm> group(maps, first_);
    low_ = group.low, high_ = group.high, products_ = group.products();
#pragma unroll
    for (int i = 0; i < group.kKeys; ++i) kept_[i] = group.key(i);
  }

  // Calls settle(low, high, products) for each group, in all lanes of its warp, with bounds of its
  // keys; where that returns false, calls visit(key) for each of its keys and for kNone.
  template <class Settle, class Visit>
  __device__ void for_each(const Settle& settle, const Visit& visit) const {
    if (first_ >= groups_) return;
    if (!settle(low_, high_, products_)) {
#pragma unroll
      for (const Key key : kept_) visit(key);
    }
    const unsigned warps = gridDim.x * (blockDim.x / 32);
    for (unsigned number = first_ + warps; number < groups_; number += warps) {
      const KeyGroup<Norm> group(maps_, number);
      if (settle(group.low, group.high, group.products())) continue;
#pragma unroll
      for (int i = 0; i < group.kKeys; ++i) visit(group.key(i));
    }
  }

 private:
  const NormMaps<Norm>& maps_;
  unsigned groups_, first_;
  Key kept_[KeyGroup<Norm>::kKeys], low_, high_;
  int products_;
};

// Counts how often each digit (`bits` bits from `shift` up) occurs in this thread block's keys that
// start with `prefix` above it. `counts` is shared memory.
template <class Norm>
__device__ void count_digits(const Keys<Norm>& keys, typename Bits<Norm>::Type prefix, int shift,
                             int bits, unsigned (&counts)[kDigits]) {
  using Key = typename Bits<Norm>::Type;
  for (int i = threadIdx.x; i < kDigits; i += blockDim.x) counts[i] = 0;
  __syncthreads();
  const auto prefix_of = [=](Key key) { return key >> shift >> bits; };
  const auto digit_of = [=](Key key) {
    return static_cast<unsigned>(key >> shift & ((Key{1} << bits) - 1));
  };
  keys.for_each(
      [&](Key low, Key high, int products) {
        if (prefix_of(high) < prefix || prefix_of(low) > prefix) return true;
        if (low >> shift != high >> shift) return false;
        if (threadIdx.x % 32 == 0) atomicAdd(&counts[digit_of(low)], products);
        return true;
      },
      [&](Key key) {
        // Lanes that add one to the same place do so in one step: like neighbours cost nothing.
        if (prefix_of(key) == prefix) atomicAdd(&counts[digit_of(key)], 1u);
      });
  __syncthreads();
}

// Adds a thread block's counts to those of all.
__device__ inline void join_counts(const unsigned (&counts)[kDigits], unsigned long long* totals) {
  for (int i = threadIdx.x; i < kDigits; i += blockDim.x) {
    if (counts[i] != 0) atomicAdd(totals + i, counts[i]);
  }
}

// Waits for all thread blocks; a single one was not launched cooperatively.
__device__ inline void sync_all() {
  if (gridDim.x == 1) {
    __syncthreads();
  } else {
    cooperative_groups::this_grid().sync();
  }
}

struct FoundDigit {
  unsigned digit;
  unsigned long long above, here;  // products with larger digits, and with this one
};

// Finds the digit in which the running count, from the largest digit down, reaches `rank` (from 1).
// All threads of the block have the result. count_of(digit) gives a count.
template <int kThreads, class CountOf>
__device__ FoundDigit find_digit(const CountOf& count_of, unsigned long long rank) {
  constexpr int kOwned = kDigits / kThreads;
  __shared__ unsigned long long warp_sums[kThreads / 32];
  __shared__ FoundDigit found;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const unsigned top = kDigits - 1 - threadIdx.x * kOwned;
  unsigned long long own[kOwned], sum = 0;
#pragma unroll
  for (int i = 0; i < kOwned; ++i) sum += own[i] = count_of(top - i);
  unsigned long long through = sum;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const unsigned long long below = __shfl_up_sync(~0u, through, distance);
    if (lane >= distance) through += below;
  }
  if (lane == 31) warp_sums[warp] = through;
  __syncthreads();
  unsigned long long earlier = lane < warp ? warp_sums[lane] : 0;
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    earlier += __shfl_xor_sync(~0u, earlier, distance);
  }
  unsigned long long before = earlier + through - sum;
#pragma unroll
  for (int i = 0; i < kOwned; ++i) {
    if (before < rank && rank <= before + own[i]) found = {top - i, before, own[i]};
    before += own[i];
  }
  __syncthreads();
  return found;
}

// The smallest key above `key`, found by the whole grid. `complement` is zero at first.
template <class Norm>
__device__ typename Bits<Norm>::Type find_successor(const Keys<Norm>& keys,
                                                    typename Bits<Norm>::Type key,
                                                    typename Bits<Norm>::Type* complement) {
  using Key = typename Bits<Norm>::Type;
  __shared__ Key block_least;
  if (threadIdx.x == 0) block_least = Bits<Norm>::kInfinity;
  __syncthreads();
  Key least = Bits<Norm>::kInfinity;
  keys.for_each(
      [&](Key low, Key high, int) {
        if (low > key) least = min(least, low);
        return low > key || high <= key;
      },
      [&](Key other) {
        if (other > key) least = min(least, other);
      });
  atomicMin(&block_least, least);
  __syncthreads();
  if (threadIdx.x == 0) atomicMax(complement, ~block_least);
  sync_all();
  return ~__ldcg(complement);
}

// `target` is the wanted count of products, `rank` the nearest number from 1 on. A launch of more
// than one thread block is cooperative.
template <class Norm>
__global__ void __launch_bounds__(kSelectThreads<Norm>, 1)
    select_tau(const NormMaps<Norm> maps, Selection<Norm>* selection, unsigned long long rank,
               double target, Norm* tau) {
  using Key = typename Bits<Norm>::Type;
  __shared__ unsigned counts[kDigits];
  let_next_kernel_start();
  // The workspace may have been memory of the kernel before.
  wait_for_previous_kernel();

  constexpr int kThreads = kSelectThreads<Norm>;
  auto* const words = reinterpret_cast<unsigned long long*>(selection);
  for (unsigned i = blockIdx.x * kThreads + threadIdx.x; i < sizeof(*selection) / sizeof(*words);
       i += gridDim.x * kThreads) {
    words[i] = 0;
  }
  // The totals are zero once all thread blocks have got here; the first pass counts meanwhile.
  const auto grid = cooperative_groups::this_grid();
  cooperative_groups::grid_group::arrival_token zeroed{};
  if (gridDim.x > 1) zeroed = grid.barrier_arrive();
  const Keys<Norm> keys(maps);
  Key key = 0;
  unsigned long long above = 0, reached = 0;
  for (int pass = 0, shift = Bits<Norm>::kCount; shift > 0; ++pass) {
    const int bits = min(shift, kDigitBits);
    shift -= bits;
    count_digits(keys, key, shift, bits, counts);
    FoundDigit found;
    if (gridDim.x == 1) {
      found = find_digit<kThreads>([&](unsigned digit) { return counts[digit]; }, rank - above);
    } else {
      unsigned long long* const totals = selection->counts[pass];
      if (pass == 0) grid.barrier_wait(std::move(zeroed));
      join_counts(counts, totals);
      sync_all();
      found = find_digit<kThreads>([&](unsigned digit) { return __ldcg(totals + digit); },
                                   rank - above);
    }
    key = key << bits | found.digit;
    above += found.above;
    reached = above + found.here;
  }

  const bool fewer_is_nearer =
      fabs(static_cast<double>(above) - target) < fabs(static_cast<double>(reached) - target);
  if (fewer_is_nearer && key != Bits<Norm>::kInfinity) {
    key = above == 0 ? Bits<Norm>::kInfinity
                     : find_successor(keys, key, &selection->successor_complement);
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) *tau = Bits<Norm>::to(key);
}

}  // namespace spamm::kernels
