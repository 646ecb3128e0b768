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
// groups are left. One cooperative launch: thread blocks meet between the passes, and each of them
// reads the counts and comes to the same conclusion. Counts are 64 bits wide; the order of atomics
// does not matter to them.
#pragma once

#include <cooperative_groups.h>

#include <cstdint>

#include "norm_products.cuh"

namespace spamm::kernels {

constexpr int kDigitBits = 11, kDigits = 1 << kDigitBits;
constexpr int kGroupEdge = 32, kGroupsPerItem = 4;
constexpr int kSelectBlocksPerSm = 2;

// Zero before the launch.
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

// The least and the greatest norm of a warp's lanes; NaN counts as above infinity.
template <class Norm>
struct NormRange {
  Norm least, greatest;

  __device__ explicit NormRange(Norm own) {
    auto low = Bits<Norm>::of_magnitude(own), high = low;
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      low = min(low, __shfl_xor_sync(~0u, low, distance));
      high = max(high, __shfl_xor_sync(~0u, high, distance));
    }
    least = Bits<Norm>::to(low);
    greatest = Bits<Norm>::to(high);
  }
};

// Items of work that warps take in turn: kGroupsPerItem values of k of a 32 x 32 patch of C's
// blocks.
template <class Norm>
__host__ __device__ int64_t select_items(const NormMaps<Norm>& maps) {
  return maps.batch * ((maps.mb - 1) / kGroupEdge + 1) * ((maps.nb - 1) / kGroupEdge + 1) *
         ((maps.kb - 1) / kGroupsPerItem + 1);
}

// Visits all products, spread over the warps of the grid. Calls settle(low, high, products) for
// each group, in all lanes, with bounds of its keys; where that returns false, calls visit(key) for
// each of its products.
template <class Norm, class Settle, class Visit>
__device__ void for_each_key(const NormMaps<Norm>& maps, const Settle& settle, const Visit& visit) {
  const int row_patches = (maps.mb - 1) / kGroupEdge + 1;
  const int column_patches = (maps.nb - 1) / kGroupEdge + 1;
  const int depths = (maps.kb - 1) / kGroupsPerItem + 1;
  const int64_t items = select_items(maps);
  const int64_t warps = static_cast<int64_t>(gridDim.x) * kProductWarps;
  const int lane = threadIdx.x % 32;
  for (int64_t item = static_cast<int64_t>(blockIdx.x) * kProductWarps + threadIdx.x / 32;
       item < items; item += warps) {
    const int64_t column_patch = item / depths, row_patch = column_patch / column_patches;
    const int first_k = static_cast<int>(item - column_patch * depths) * kGroupsPerItem;
    const int column = static_cast<int>(column_patch - row_patch * column_patches) * kGroupEdge;
    const int64_t batch = row_patch / row_patches;
    const int row = static_cast<int>(row_patch - batch * row_patches) * kGroupEdge;
    const int rows = min(kGroupEdge, maps.mb - row), columns = min(kGroupEdge, maps.nb - column);
    // Lanes past the edge repeat the last row or column, which leaves the bounds as they are.
    const Norm* const a = maps.a + (batch * maps.mb + row + min(lane, rows - 1)) * maps.kb;
    const Norm* const b = maps.b + batch * maps.kb * maps.nb + column + min(lane, columns - 1);
    Norm norm_a[kGroupsPerItem], norm_b[kGroupsPerItem];
#pragma unroll
    for (int i = 0; i < kGroupsPerItem; ++i) {
      const int64_t k = min(first_k + i, maps.kb - 1);
      norm_a[i] = a[k];
      norm_b[i] = b[k * maps.nb];
    }
#pragma unroll
    for (int i = 0; i < kGroupsPerItem; ++i) {
      if (first_k + i >= maps.kb) break;
      const NormRange<Norm> range_a(norm_a[i]), range_b(norm_b[i]);
      if (settle(product_key(range_a.least, range_b.least),
                 product_key(range_a.greatest, range_b.greatest), rows * columns)) {
        continue;
      }
      for (int r = 0; r < rows; ++r) {
        const Norm other = __shfl_sync(~0u, norm_a[i], r);
        if (lane < columns) visit(product_key(other, norm_b[i]));
      }
    }
  }
}

// Counts digits into shared memory by way of a register: neighbouring products are alike, and one
// addition stands for a run of them.
struct RunCounter {
  unsigned (&counts)[kDigits];
  unsigned digit = 0, run = 0;

  __device__ void add(unsigned next, unsigned times) {
    if (next != digit) {
      flush();
      digit = next;
    }
    run += times;
  }

  __device__ void flush() {
    if (run != 0) atomicAdd(&counts[digit], run);
    run = 0;
  }
};

// Adds to `totals` how often each digit (`bits` bits from `shift` up) occurs in the keys that start
// with `prefix` above it. `counts` is shared memory.
template <class Norm>
__device__ void count_digits(const NormMaps<Norm>& maps, typename Bits<Norm>::Type prefix,
                             int shift, int bits, unsigned (&counts)[kDigits],
                             unsigned long long* totals) {
  using Key = typename Bits<Norm>::Type;
  for (int i = threadIdx.x; i < kDigits; i += kProductThreads) counts[i] = 0;
  __syncthreads();
  const auto prefix_of = [=](Key key) { return key >> shift >> bits; };
  const auto digit_of = [=](Key key) {
    return static_cast<unsigned>(key >> shift & ((Key{1} << bits) - 1));
  };
  RunCounter counter{counts};
  for_each_key(
      maps,
      [&](Key low, Key high, int products) {
        if (prefix_of(high) < prefix || prefix_of(low) > prefix) return true;
        if (low >> shift != high >> shift) return false;
        if (threadIdx.x % 32 == 0) counter.add(digit_of(low), products);
        return true;
      },
      [&](Key key) {
        if (prefix_of(key) == prefix) counter.add(digit_of(key), 1);
      });
  counter.flush();
  __syncthreads();
  for (int i = threadIdx.x; i < kDigits; i += kProductThreads) {
    if (counts[i] != 0) atomicAdd(totals + i, counts[i]);
  }
}

struct FoundDigit {
  unsigned digit;
  unsigned long long above, here;  // products with larger digits, and with this one
};

// Finds the digit in which the running count, from the largest digit down, reaches `rank` (from 1).
// All threads of the block have the result.
__device__ inline FoundDigit find_digit(const unsigned long long* totals, unsigned long long rank) {
  constexpr int kOwned = kDigits / kProductThreads;
  __shared__ unsigned long long warp_sums[kProductWarps];
  __shared__ FoundDigit found;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const unsigned top = kDigits - 1 - threadIdx.x * kOwned;
  unsigned long long own[kOwned], sum = 0;
#pragma unroll
  for (int i = 0; i < kOwned; ++i) sum += own[i] = __ldcg(totals + top - i);
  unsigned long long through = sum;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const unsigned long long below = __shfl_up_sync(~0u, through, distance);
    if (lane >= distance) through += below;
  }
  if (lane == 31) warp_sums[warp] = through;
  __syncthreads();
  for (int w = 0; w < warp; ++w) through += warp_sums[w];
  unsigned long long before = through - sum;
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
__device__ typename Bits<Norm>::Type find_successor(const NormMaps<Norm>& maps,
                                                    typename Bits<Norm>::Type key,
                                                    typename Bits<Norm>::Type* complement) {
  using Key = typename Bits<Norm>::Type;
  __shared__ Key block_least;
  if (threadIdx.x == 0) block_least = Bits<Norm>::kInfinity;
  __syncthreads();
  Key least = Bits<Norm>::kInfinity;
  for_each_key(
      maps,
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
  cooperative_groups::this_grid().sync();
  return ~__ldcg(complement);
}

// `target` is the wanted count of products, `rank` the nearest number from 1 on. Cooperative
// launch.
template <class Norm>
__global__ void __launch_bounds__(kProductThreads, kSelectBlocksPerSm)
    select_tau(const NormMaps<Norm> maps, Selection<Norm>* selection, unsigned long long rank,
               double target, Norm* tau) {
  using Key = typename Bits<Norm>::Type;
  __shared__ unsigned counts[kDigits];

  Key key = 0;
  unsigned long long above = 0, reached = 0;
  for (int pass = 0, shift = Bits<Norm>::kCount; shift > 0; ++pass) {
    const int bits = min(shift, kDigitBits);
    shift -= bits;
    count_digits(maps, key, shift, bits, counts, selection->counts[pass]);
    cooperative_groups::this_grid().sync();
    const FoundDigit found = find_digit(selection->counts[pass], rank - above);
    key = key << bits | found.digit;
    above += found.above;
    reached = above + found.here;
  }

  const bool fewer_is_nearer =
      fabs(static_cast<double>(above) - target) < fabs(static_cast<double>(reached) - target);
  if (fewer_is_nearer && key != Bits<Norm>::kInfinity) {
    key = above == 0 ? Bits<Norm>::kInfinity
                     : find_successor(maps, key, &selection->successor_complement);
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) *tau = Bits<Norm>::to(key);
}

}  // namespace spamm::kernels
