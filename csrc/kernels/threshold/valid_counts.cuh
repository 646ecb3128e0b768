// The paper's V: how many k are valid for each block of C.
#pragma once

#include <cstdint>

#include "kernels/threshold/norm_products.cuh"

namespace spamm::kernels {

// counts: (batch, mb, nb). Each thread block counts one patch.
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
