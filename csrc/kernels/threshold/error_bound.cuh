// The error bound of skipping, sqrt(sum over (i, j) of (sum over skipped k of norm_a * norm_b)^2).
//
// All sums are double, rounded upwards, in a fixed order. kNormSlack and at_most cover the rounding
// of the norms themselves.
#pragma once

#include <cstdint>

#include "kernels/threshold/norm_products.cuh"
#include "kernels/threshold/sum_of_squares.cuh"
#include "norm_slack.h"

namespace spamm::kernels {

// The smallest number of the norms' type that is at least x.
template <class Norm>
__device__ Norm round_up(double x) {
  if constexpr (sizeof(Norm) == 4) {
    return __double2float_ru(x);
  } else {
    return x;
  }
}

// Computes the bound of a threshold. Each thread block sums one patch of C. `partial` has room for
// gridDim.x sums. `arrived` is zero.
template <class Norm>
__global__ void __launch_bounds__(kProductThreads)
    error_bound(const NormMaps<Norm> maps, const Tau<Norm> tau, SumOfSquares<Norm>* partial,
                unsigned* arrived, Norm* bound) {
  __shared__ double patch_lost[kPatchRows][32];
  const Patch patch(maps, blockIdx.x);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  const Norm threshold = tau.value();
  double lost[kPatchRows] = {};
  for_each_product(maps, patch, warp, maps.kb, kProductWarps,
                   [&](int r, Norm a, Norm b, Norm skip_norm_b) {
                     if (!is_valid(norm_product(a, skip_norm_b), threshold)) {
                       lost[r] = __dadd_ru(lost[r], __dmul_ru(at_most(a), at_most(b)));
                     }
                   });
  for (int turn = 0; turn < kProductWarps; ++turn) {
    if (warp == turn) {
#pragma unroll
      for (int r = 0; r < kPatchRows; ++r) {
        double& sum = patch_lost[r][lane];
        sum = turn == 0 ? lost[r] : __dadd_ru(sum, lost[r]);
      }
    }
    __syncthreads();
  }
  if (warp == 0) {
    SumOfSquares<Norm> squares{};
    for (int r = 0; r < kPatchRows; ++r) squares.add(patch_lost[r][lane]);
    squares = sum_warp(squares);
    if (lane == 0) partial[blockIdx.x] = squares;
  }
  if (!is_last_block(arrived) || warp != 0) return;

  const double root = sum_array(partial, gridDim.x).root();
  if (lane == 0) *bound = round_up<Norm>(__dmul_ru(root, 1 + kNormSlack<Norm>));
}

}  // namespace spamm::kernels
