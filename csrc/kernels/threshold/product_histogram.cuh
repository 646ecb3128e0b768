// Counts of norm products: by their keys, in one pass over the staircases, where each thread block
// counts in shared memory first; and the paper's V, how many are valid for each block of C.
#pragma once

#include <cstdint>

#include "kernels/threshold/norm_products.cuh"
#include "kernels/threshold/staircases.cuh"

namespace spamm::kernels {

// Adds to `counts`, which has bins + 1 entries, how many products have their keys in each of `bins`
// ranges of 2^shift keys, from key *low on, and above them. bins << shift is at most the number of
// keys, so that the end of the last bin fits a key. The counts of a thread block are in dynamic
// shared memory.
template <class Norm, int kLaneRows>
__global__ void __launch_bounds__(kSelectThreads<Norm>, 1)
    product_histogram(const __grid_constant__ NormMaps<Norm> maps, const int64_t* low, int shift,
                      int bins, unsigned long long* counts) {
  using Key = typename Bits<Norm>::Type;
  extern __shared__ unsigned own_counts[];
  __shared__ Staircase<Norm, kLaneRows> place_of_warp[kSelectWarps<Norm>];
  // Nothing is read twice, so one staircase for each warp is enough.
  const Staircases<Norm, kLaneRows> stairs(maps, place_of_warp, /*kept=*/1);
  const Key first = static_cast<Key>(*low), last = first + (static_cast<Key>(bins) << shift) - 1;
  const KeyInterval<Norm> interval{first, min(last, Bits<Norm>::kInfinity)};
  count_bins(stairs, interval, shift, bins, own_counts);
  for (int i = threadIdx.x; i <= bins; i += blockDim.x) {
    if (own_counts[i] != 0) atomicAdd(counts + i, own_counts[i]);
  }
}

// How many k are valid. counts: (batch, mb, nb). Each thread block counts one patch.
template <class Norm>
__global__ void __launch_bounds__(kProductThreads)
    valid_counts(const NormMaps<Norm> maps, const Tau<Norm> threshold, int32_t* counts) {
  __shared__ int32_t partial[kProductWarps][kPatchRows][32];
  const Patch patch(maps, blockIdx.x);
  const Norm tau = threshold.value();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int32_t valid[kPatchRows] = {};
  for_each_product(maps, patch, warp, maps.kb, kProductWarps, [&](int r, Norm a, Norm b, Norm) {
    valid[r] += is_valid(norm_product(a, b), tau);
  });
  for (int r = 0; r < kPatchRows; ++r) partial[warp][r][lane] = valid[r];
  __syncthreads();
  const int row = patch.row + warp;
  if (warp >= kPatchRows || row >= maps.mb || patch.column >= maps.nb) return;
  int32_t total = 0;
  for (int w = 0; w < kProductWarps; ++w) total += partial[w][warp][lane];
  counts[(patch.batch * maps.mb + row) * maps.nb + patch.column] = total;
}

}  // namespace spamm::kernels
