// Adds up the sums of a tile's two segments (segments.cuh).
//
// Every warp does so for its own piece of the tile. The one that is done first leaves its sums in C
// itself, which is then in the L2 cache; the other adds them to its own, and stores C. A sum of two
// does not depend on which is first, so the result does not depend on timing. The second waits only
// while the first is storing.
#pragma once

#include <cstdint>

#include "kernels/multiply/params.h"
#include "kernels/multiply/sm90/pipeline.cuh"

namespace spamm::kernels::multiply::sm90 {

// The meeting place of the warps of two segments with the same piece of a tile meet. All lanes call
// everything.
class SegmentMeeting {
 public:
  __device__ explicit SegmentMeeting(unsigned* state) : state_(state) {}

  // Tells whether the other has not come. Called once.
  __device__ __forceinline__ bool is_first() const {
    unsigned state = 0;
    if (threadIdx.x % 32 == 0) state = atomicOr(state_, kBegun);
    return __shfl_sync(~0u, state, 0) == 0;
  }

  // Says that the sums of the first are in C, or with `filled` false that they are zeros.
  __device__ __forceinline__ void leave(bool filled) const {
    __syncwarp();
    if (threadIdx.x % 32 != 0) return;
    __threadfence();  // what all lanes have written comes before
    atomicOr(state_, kLeft | (filled ? kFilled : 0));
  }

  // Waits until the first has left its sums. Returns whether they are in C.
  __device__ __forceinline__ bool wait() const {
    unsigned state = 0;
    if (threadIdx.x % 32 == 0) {
      do {
        asm volatile("ld.acquire.gpu.u32 %0, [%1];" : "=r"(state) : "l"(state_) : "memory");
      } while ((state & kLeft) == 0);
    }
    __syncwarp();
    return __shfl_sync(~0u, state, 0) & kFilled;
  }

 private:
  static constexpr unsigned kBegun = 1, kLeft = 2, kFilled = 4;

  unsigned* state_;
};

__device__ __forceinline__ double* entry_of_c(const MultiplyParams<double>& p, int batch,
                                              int64_t row, int64_t column) {
  return static_cast<double*>(p.c) + batch * p.c_batch_stride + row * p.c_leading + column;
}

// Leaves sums in C, where take_pair() of another thread block finds them. kPairs: both columns
// exist, and their address is aligned.
template <bool kPairs>
__device__ __forceinline__ void leave_pair(const MultiplyParams<double>& p, int batch, int64_t row,
                                           int64_t column, double x, double y) {
  double* const at = entry_of_c(p, batch, row, column);
  if constexpr (kPairs) {
    __stcg(reinterpret_cast<double2*>(at), double2{x, y});
  } else if (row < p.m) {
    if (column < p.n) __stcg(at, x);
    if (column + 1 < p.n) __stcg(at + 1, y);
  }
}

// Adds what leave_pair() left.
template <bool kPairs>
__device__ __forceinline__ void take_pair(const MultiplyParams<double>& p, int batch, int64_t row,
                                          int64_t column, double& x, double& y) {
  const double* const at = entry_of_c(p, batch, row, column);
  if constexpr (kPairs) {
    const double2 pair = __ldcg(reinterpret_cast<const double2*>(at));
    x += pair.x, y += pair.y;
  } else if (row < p.m) {
    if (column < p.n) x += __ldcg(at);
    if (column + 1 < p.n) y += __ldcg(at + 1);
  }
}

}  // namespace spamm::kernels::multiply::sm90
