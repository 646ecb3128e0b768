// Counting and collecting products one by one, for select_among(). The products' each_key(visit)
// calls visit(key) for each of them that the thread has.
#pragma once

#include "kernels/threshold/select_tau.cuh"

namespace spamm::kernels {

// See the one for staircases, count_bins.cuh.
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

// See the one for staircases, select_tau.cuh.
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
