// Counting the products of staircases by their keys.
#pragma once

#include "kernels/threshold/staircases.cuh"

namespace spamm::kernels {

// For each thread block, so that its own counts fit 32 bits.
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
