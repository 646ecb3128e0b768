// What the threshold kernels share: the norm maps, the walk over the products of norms, and the
// order in which the thread blocks of one launch end.
#pragma once

#include <cstdint>

#include "norm_maps.h"
#include "skip_test.cuh"

namespace spamm::kernels {

constexpr int kProductThreads = 256, kProductWarps = kProductThreads / 32;

// A patch of C's blocks, of which each lane has one column: each norm of B that is read serves all
// the patch's rows.
struct Patch {
  static_assert(kPatchColumns == 32);
  int64_t batch;
  int row, column;  // the first block row; this lane's block column

  Patch() = default;
  template <class Norm>
  __device__ Patch(const NormMaps<Norm>& maps, int64_t number) {
    const int patch_rows = (maps.mb - 1) / kPatchRows + 1;
    const int patch_columns = (maps.nb - 1) / kPatchColumns + 1;
    const int64_t patch_row = number / patch_columns;
    batch = patch_row / patch_rows;
    row = static_cast<int>(patch_row - batch * patch_rows) * kPatchRows;
    column = static_cast<int>(number - patch_row * patch_columns) * kPatchColumns +
             threadIdx.x % 32;
  }
};

// Calls visit(r, norm of A, norm of B, judged norm of B) for the rows r of a patch and for k = first,
// first + step, ... < last, in this lane's column; for nothing where the patch sticks out.
template <class Norm, class Visit>
__device__ void for_each_product(const NormMaps<Norm>& maps, const Patch& patch, int first, int last,
                                 int step, const Visit& visit) {
  if (patch.column >= maps.nb) return;
  const Norm* a = maps.a + (patch.batch * maps.mb + patch.row) * maps.kb;
  const int64_t b = patch.batch * maps.kb * maps.nb + patch.column;
  const int rows = min(kPatchRows, maps.mb - patch.row);
  for (int k = first; k < last; k += step) {
    const int64_t at = b + static_cast<int64_t>(k) * maps.nb;
    const Norm norm_b = maps.b[at], judged_b = maps.judged_b[at];
#pragma unroll
    for (int r = 0; r < kPatchRows; ++r) {
      if (r < rows) visit(r, a[static_cast<int64_t>(r) * maps.kb + k], norm_b, judged_b);
    }
  }
}

// True in the thread block that gets here last, which then sees what all the others have written.
// `arrived` is zero at first and again at the end.
__device__ inline bool is_last_block(unsigned* arrived) {
  __shared__ bool last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) last = atomicInc(arrived, gridDim.x - 1) == gridDim.x - 1;
  __syncthreads();
  __threadfence();
  return last;
}

// Non-negative floating-point numbers order as their bit patterns do.
template <class Norm>
struct Bits;

template <>
struct Bits<float> {
  using Type = uint32_t;
  static constexpr int kCount = 31;  // without the sign
  static constexpr Type kInfinity = 0x7f800000;
  __device__ static Type of(float x) { return __float_as_uint(x); }
  __device__ static float to(Type bits) { return __uint_as_float(bits); }
};

template <>
struct Bits<double> {
  using Type = unsigned long long;
  static constexpr int kCount = 63;
  static constexpr Type kInfinity = 0x7ff0000000000000;
  __device__ static Type of(double x) { return __double_as_longlong(x); }
  __device__ static double to(Type bits) { return __longlong_as_double(bits); }
};

}  // namespace spamm::kernels
