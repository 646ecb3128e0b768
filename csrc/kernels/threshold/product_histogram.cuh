// Counts of norm products by their keys. One pass over the staircases; each thread block counts in
// shared memory first.
#pragma once

#include <cstdint>

#include "kernels/threshold/count_bins.cuh"

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

}  // namespace spamm::kernels
