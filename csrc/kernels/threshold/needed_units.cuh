// Which units of B the parts of a product over several devices need.
#pragma once

#include <cstdint>

#include "kernels/common/skip_test.cuh"
#include "kernels/threshold/unit_params.h"

namespace spamm::kernels {

constexpr int kUnitThreads = 256, kBlockStages = 512;  // of a thread block

// The larger norm; NaN counts as the largest.
template <class Norm>
__device__ Norm larger_norm(Norm x, Norm y) {
  return y > x || isnan(y) ? y : x;
}

// Each thread block decides about units of one block row of B. Rounding is monotone, so the largest
// norms decide exactly as all norms would. Grid: (kb, thread blocks for all stages).
template <class Norm>
__global__ void __launch_bounds__(kUnitThreads) needed_units(const UnitParams<Norm> p) {
  __shared__ Norm largest_b[kBlockStages];
  const int64_t k = blockIdx.x, first = int64_t{blockIdx.y} * kBlockStages;
  const int64_t stages = min(int64_t{kBlockStages}, p.stages - first);
  const int lane = threadIdx.x % 32;
  for (int64_t stage = threadIdx.x / 32; stage < stages; stage += kUnitThreads / 32) {
    const int64_t begin = (first + stage) * p.stage_blocks;
    const int64_t end = min(p.nb, begin + p.stage_blocks);
    Norm largest = 0;
    for (int64_t j = begin + lane; j < end; j += 32) {
      largest = larger_norm(largest, p.norm_b[k * p.nb + j]);
    }
    for (int distance = 16; distance > 0; distance /= 2) {
      largest = larger_norm(largest, __shfl_xor_sync(~0u, largest, distance));
    }
    if (lane == 0) largest_b[stage] = largest;
  }
  __syncthreads();
  const Norm tau = p.tau.value();
  for (int64_t i = threadIdx.x; i < p.parts * stages; i += kUnitThreads) {
    const int64_t row = i / stages * p.kb + k, stage = i % stages;
    p.needed[row * p.stages + first + stage] =
        is_valid(norm_product(p.largest_a[row], largest_b[stage]), tau);
  }
}

}  // namespace spamm::kernels
