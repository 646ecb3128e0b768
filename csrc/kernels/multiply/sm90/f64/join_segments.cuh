// Adds up the sums of a tile's segments (segments.cuh).
//
// Nobody waits: the thread block that is done last with a tile adds up what the others have left in
// global memory, which is in the L2 cache. Every warp does so for its own piece of the tile. The
// order of the additions is that of a tree, (0 + 1) + (2 + 3), whoever does them; a sum of two does
// not depend on which is first. So the result does not depend on timing.
#pragma once

#include <cstdint>

#include "kernels/multiply/sm90/f64/segments.h"
#include "kernels/multiply/sm90/pipeline.cuh"

namespace spamm::kernels::multiply::sm90 {

// The segments of one warp's piece of a tile that are done, as bits, and those of them whose sums
// are not just zeros, in bits from kFilled on.
class Arrivals {
 public:
  static constexpr int kFilled = 16;

  __device__ Arrivals(int* word, int segments) : word_(word), all_((1u << segments) - 1) {}

  // Whether all segments but `own` are known to be done.
  __device__ __forceinline__ bool others_are_done(int own) {
    uint32_t seen = 0;
    if (threadIdx.x % 32 == 0) {
      asm volatile("ld.acquire.gpu.u32 %0, [%1];" : "=r"(seen) : "l"(word_) : "memory");
    }
    return learn(seen, own);
  }

  // Says that `own` is done. Returns whether all others were. What any lane has written before is
  // seen by the one for whom this is true.
  __device__ __forceinline__ bool arrive(int own, bool filled) {
    __threadfence();
    __syncwarp();
    uint32_t seen = 0;
    if (threadIdx.x % 32 == 0) {
      seen = atomicOr(reinterpret_cast<unsigned*>(word_), 1u << own | static_cast<uint32_t>(filled)
                                                                          << (kFilled + own));
      __threadfence();
    }
    return learn(seen, own);
  }

  __device__ bool is_filled(int segment) const { return seen_ >> (kFilled + segment) & 1; }

 private:
  __device__ __forceinline__ bool learn(uint32_t seen, int own) {
    __syncwarp();
    seen_ = __shfl_sync(~0u, seen, 0);
    return ((seen_ | 1u << own) & all_) == all_;
  }

  int* word_;
  uint32_t all_, seen_ = 0;
};

// The sums of one warp's piece of a tile, of all segments, in global memory. kPairs: pairs of sums
// in each lane.
template <int kPairs>
class SegmentSums {
 public:
  __device__ explicit SegmentSums(double* sums)
      : pairs_(reinterpret_cast<double2*>(sums) + threadIdx.x % 32) {}

  __device__ __forceinline__ void put(int segment, int i, double2 pair) const {
    __stcg(at(segment, i), pair);
  }
  __device__ __forceinline__ double2 get(int segment, int i, bool filled) const {
    return filled ? __ldcg(at(segment, i)) : double2{};
  }

 private:
  __device__ double2* at(int segment, int i) const { return pairs_ + (segment * kPairs + i) * 32; }

  double2* pairs_;
};

}  // namespace spamm::kernels::multiply::sm90
