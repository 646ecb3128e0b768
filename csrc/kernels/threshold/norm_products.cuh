// Common parts of the threshold kernels: patches of C, the loop over products of norms, and finding
// out which thread block of a launch finishes last.
#pragma once

#include <cooperative_groups.h>

#include <cstdint>
#include <utility>

#include "kernels/common/numeric.cuh"
#include "kernels/common/skip_test.cuh"
#include "kernels/threshold/map_pair.h"

namespace spamm::kernels {

constexpr int kProductThreads = 256, kProductWarps = kProductThreads / 32;
constexpr int kBatch = 4;  // values of k whose norms are loaded together

// A patch of C's blocks. Each lane has one column, so that a norm of B serves all of its rows.
struct Patch {
  static_assert(kPatchColumns == 32);
  int64_t batch;
  int row, column;  // the first block row; this lane's block column

  template <class Norm>
  __device__ Patch(const NormMaps<Norm>& maps, int64_t number) {
    const int patch_rows = (maps.mb - 1) / kPatchRows + 1;
    const int patch_columns = (maps.nb - 1) / kPatchColumns + 1;
    const int64_t patch_row = number / patch_columns;
    batch = patch_row / patch_rows;
    row = static_cast<int>(patch_row - batch * patch_rows) * kPatchRows;
    column =
        static_cast<int>(number - patch_row * patch_columns) * kPatchColumns + threadIdx.x % 32;
  }
};

// Visits kBatch values of k; all their norms are read before the first is used. kWhole: the patch
// and the batch lie completely inside the maps, as nearly all do.
template <bool kWhole, class Norm, class Visit>
__device__ void visit_batch(const NormMaps<Norm>& maps, const Patch& patch, int first, int last,
                            int step, const Visit& visit) {
  const int rows = kWhole ? kPatchRows : min(kPatchRows, maps.mb - patch.row);
  const Norm* const a = maps.a + (patch.batch * maps.mb + patch.row) * maps.kb;
  const int64_t b = patch.batch * maps.kb * maps.nb + patch.column;
  Norm norm_a[kBatch][kPatchRows], norm_b[kBatch], skip_norm_b[kBatch];
#pragma unroll
  for (int i = 0; i < kBatch; ++i) {
    const int k = kWhole ? first + i * step : min(first + i * step, last - 1);
    const int64_t at = b + static_cast<int64_t>(k) * maps.nb;
    norm_b[i] = maps.b[at];
    skip_norm_b[i] = maps.skip_norm_b[at];
#pragma unroll
    for (int r = 0; r < kPatchRows; ++r) {
      norm_a[i][r] = a[static_cast<int64_t>(kWhole ? r : min(r, rows - 1)) * maps.kb + k];
    }
  }
#pragma unroll
  for (int i = 0; i < kBatch; ++i) {
#pragma unroll
    for (int r = 0; r < kPatchRows; ++r) {
      if (kWhole || (first + i * step < last && r < rows)) {
        visit(r, norm_a[i][r], norm_b[i], skip_norm_b[i]);
      }
    }
  }
}

// Calls visit(r, norm of A, norm of B, skip norm of B) in this lane's column, for all rows r of a
// patch and for k = first, first + step, ... < last. Blocks outside C are not visited.
template <class Norm, class Visit>
__device__ void for_each_product(const NormMaps<Norm>& maps, const Patch& patch, int first,
                                 int last, int step, const Visit& visit) {
  if (patch.column >= maps.nb || patch.row >= maps.mb) return;
  for (; first < last; first += kBatch * step) {
    if (patch.row + kPatchRows <= maps.mb && first + (kBatch - 1) * step < last) {
      visit_batch<true>(maps, patch, first, last, step, visit);
    } else {
      visit_batch<false>(maps, patch, first, last, step, visit);
    }
  }
}

// True in the last thread block to call this. It sees all writes of the others. `arrived` must be
// zero before, and is zero again after.
__device__ inline bool is_last_block(unsigned* arrived) {
  __shared__ bool last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) last = atomicInc(arrived, gridDim.x - 1) == gridDim.x - 1;
  __syncthreads();
  __threadfence();
  return last;
}

// The key of a product. NaN and infinity, which no threshold skips, both have the largest key.
template <class Norm>
__device__ typename Bits<Norm>::Type product_key(Norm a, Norm b) {
  return min(Bits<Norm>::of_magnitude(norm_product(a, b)), Bits<Norm>::kInfinity);
}

// The sum of a warp's lanes up to each.
template <class T>
__device__ T sum_through(T own) {
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const T below = __shfl_up_sync(~0u, own, distance);
    if (threadIdx.x % 32 >= distance) own += below;
  }
  return own;
}

// All threads of a launch arrive, then wait. kGrid: it is cooperative; else of one thread block.
template <bool kGrid>
struct Meeting {
  __device__ void arrive() {}
  __device__ void wait() { __syncthreads(); }
};
template <>
struct Meeting<true> {
  cooperative_groups::grid_group::arrival_token token{};
  __device__ void arrive() { token = cooperative_groups::this_grid().barrier_arrive(); }
  __device__ void wait() { cooperative_groups::this_grid().barrier_wait(std::move(token)); }
};

__device__ inline void meet() {
  Meeting<true> meeting;
  meeting.arrive();
  meeting.wait();
}

}  // namespace spamm::kernels
