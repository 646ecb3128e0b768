// The threshold for a valid ratio, found exactly on the device: radix selection over the bit patterns
// of all norm products, recomputed in every pass. (The paper bisects on the ratio.)
//
// A pass counts, among the products whose higher bits are those found so far, each value of the next
// 11 bits; its last thread block picks the value that holds the product of the wanted rank, counted
// from the largest. After the last pass the product is known, and with it the number of products
// above and equal to it: the two reachable counts next to the target. Where the lower one is nearer,
// one more pass looks for the product's successor.
// Counts are 64 bits wide; order of atomics does not matter to sums of integers.
#pragma once

#include <cstdint>

#include "norm_products.cuh"

namespace spamm::kernels {

constexpr int kDigitBits = 11, kDigits = 1 << kDigitBits;
constexpr int kSelectRows = kProductWarps * kPatchRows, kSelectDepth = 32;

// All zero before the first pass.
template <class Norm>
struct Selection {
  unsigned long long counts[kDigits];
  unsigned long long above;     // products above those that share the bits found so far
  typename Bits<Norm>::Type found;
  typename Bits<Norm>::Type successor;
  bool wants_successor;
  unsigned arrived;
};

// Products that no threshold skips, NaN and infinity, are one value, the largest.
template <class Norm>
__device__ typename Bits<Norm>::Type product_key(Norm a, Norm b) {
  using Key = typename Bits<Norm>::Type;
  const Key magnitude = Bits<Norm>::of(norm_product(a, b)) & ~(Key{1} << Bits<Norm>::kCount);
  return min(magnitude, Bits<Norm>::kInfinity);
}

// Visits all products, spread over the grid: calls visit(key).
template <class Norm, class Visit>
__device__ void for_each_key(const NormMaps<Norm>& maps, const Visit& visit) {
  const int row_tiles = (maps.mb - 1) / kSelectRows + 1, column_tiles = (maps.nb - 1) / kPatchColumns + 1;
  const int depth_tiles = (maps.kb - 1) / kSelectDepth + 1;
  const int64_t tiles = maps.batch * row_tiles * column_tiles * depth_tiles;
  for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const int64_t column_tile = tile / depth_tiles, row_tile = column_tile / column_tiles;
    const int first = static_cast<int>(tile - column_tile * depth_tiles) * kSelectDepth;
    Patch patch;
    patch.batch = row_tile / row_tiles;
    patch.row = static_cast<int>(row_tile - patch.batch * row_tiles) * kSelectRows +
                static_cast<int>(threadIdx.x) / 32 * kPatchRows;
    patch.column = static_cast<int>(column_tile - row_tile * column_tiles) * kPatchColumns +
                   static_cast<int>(threadIdx.x) % 32;
    for_each_product(maps, patch, first, min(first + kSelectDepth, maps.kb), 1,
                     [&](int, Norm a, Norm b, Norm) { visit(product_key(a, b)); });
  }
}

// Finds the digit in which the running count, from the largest digit down, reaches `rank` (from 1):
// calls found(digit, number of products in larger digits) in one thread.
template <class Found>
__device__ void find_digit(const unsigned long long* counts, unsigned long long rank,
                           const Found& found) {
  constexpr int kOwned = kDigits / kProductThreads;
  __shared__ unsigned long long warp_sums[kProductWarps];
  const int top = kDigits - 1 - static_cast<int>(threadIdx.x) * kOwned;
  unsigned long long own = 0;
  for (int i = 0; i < kOwned; ++i) own += __ldcg(counts + top - i);
  unsigned long long through = own;
  for (int distance = 1; distance < 32; distance *= 2) {
    const unsigned long long below = __shfl_up_sync(~0u, through, distance);
    if (threadIdx.x % 32 >= distance) through += below;
  }
  if (threadIdx.x % 32 == 31) warp_sums[threadIdx.x / 32] = through;
  __syncthreads();
  for (int w = 0; w < static_cast<int>(threadIdx.x) / 32; ++w) through += warp_sums[w];
  unsigned long long before = through - own;
  if (rank <= before || rank > through) return;
  int digit = top;
  for (unsigned long long count; before + (count = __ldcg(counts + digit)) < rank; --digit) {
    before += count;
  }
  found(digit, before);
}

// One pass: settles `bits` bits above `shift`. `rank` and `target` (the wanted count, before it was
// rounded up to a rank) are those of all products. The pass with shift 0 writes tau.
template <class Norm>
__global__ void __launch_bounds__(kProductThreads)
    select_digit(const NormMaps<Norm> maps, Selection<Norm>* selection, int shift, int bits,
                 unsigned long long rank, double target, Norm* tau) {
  using Key = typename Bits<Norm>::Type;
  __shared__ unsigned counts[kDigits];
  for (int i = threadIdx.x; i < kDigits; i += kProductThreads) counts[i] = 0;
  __syncthreads();

  const int settled = shift + bits;
  const Key prefix = selection->found >> settled;
  const Key digit_mask = (Key{1} << bits) - 1;
  // Neighbouring products are alike: count runs in a register, and meet at the atomics less often.
  unsigned run_digit = 0, run = 0;
  for_each_key(maps, [&](Key key) {
    if (key >> settled != prefix) return;
    const unsigned digit = static_cast<unsigned>(key >> shift & digit_mask);
    if (digit != run_digit) {
      if (run != 0) atomicAdd(&counts[run_digit], run);
      run_digit = digit;
      run = 0;
    }
    ++run;
  });
  if (run != 0) atomicAdd(&counts[run_digit], run);
  __syncthreads();
  for (int i = threadIdx.x; i < kDigits; i += kProductThreads) {
    if (counts[i] != 0) atomicAdd(&selection->counts[i], counts[i]);
  }
  if (!is_last_block(&selection->arrived)) return;

  find_digit(selection->counts, rank - selection->above, [&](int digit, unsigned long long before) {
    const Key found = selection->found | static_cast<Key>(digit) << shift;
    const unsigned long long above = selection->above + before;
    selection->found = found;
    selection->above = above;
    if (shift != 0) return;
    const double reached = static_cast<double>(above + __ldcg(selection->counts + digit));
    const bool fewer = fabs(static_cast<double>(above) - target) < fabs(reached - target);
    selection->wants_successor = fewer && found != Bits<Norm>::kInfinity;
    selection->successor = Bits<Norm>::kInfinity;
    *tau = Bits<Norm>::to(found);
  });
  __syncthreads();
  for (int i = threadIdx.x; i < kDigits; i += kProductThreads) selection->counts[i] = 0;
}

// The smallest product above the one found, where that is the better threshold.
template <class Norm>
__global__ void __launch_bounds__(kProductThreads)
    select_successor(const NormMaps<Norm> maps, Selection<Norm>* selection, Norm* tau) {
  using Key = typename Bits<Norm>::Type;
  if (!selection->wants_successor) return;
  const Key found = selection->found;
  __shared__ Key block_least;
  if (threadIdx.x == 0) block_least = Bits<Norm>::kInfinity;
  __syncthreads();
  Key least = Bits<Norm>::kInfinity;
  for_each_key(maps, [&](Key key) {
    if (key > found) least = min(least, key);
  });
  atomicMin(&block_least, least);
  __syncthreads();
  if (threadIdx.x == 0) atomicMin(&selection->successor, block_least);
  if (!is_last_block(&selection->arrived)) return;
  if (threadIdx.x == 0) *tau = Bits<Norm>::to(__ldcg(&selection->successor));
}

}  // namespace spamm::kernels
