// Segments: the steps of a tile, dealt out to the thread blocks of a cluster where C has too few
// tiles to fill the chip. Each thread block computes its sums of the whole tile;
// join_segments.cuh adds them up. A thread block has one tile.
//
// Which step belongs to which segment follows from its number alone. So whether other blocks are
// skipped changes no bit, and neither does timing. Neighbouring steps go to different segments,
// because the steps of one kernel position are often invalid together: in the padding, say. Each
// run of 2^log2_segments steps starts with another segment, so that none is left with one channel
// group.
#pragma once

#include "kernels/conv/sm90/pipeline.cuh"

namespace spamm::kernels::conv::sm90 {

// The thread block's number in its cluster, which is that of its segment.
__device__ __forceinline__ int segment_of_block(const ConvParams& p) {
  return blockIdx.x & ((1 << p.log2_segments) - 1);
}

// The thread block's first tile.
template <class Config>
__device__ __forceinline__ int first_tile(const ConvParams& p) {
  if constexpr (Config::kSegmented) {
    return blockIdx.x >> p.log2_segments;
  } else {
    return blockIdx.x;
  }
}

// The number of step `index` of the thread block, among all of a tile. From the number of its steps
// on, an index gives a number past the end.
template <class Config>
__device__ __forceinline__ int step_number(const ConvParams& p, int index) {
  if constexpr (Config::kSegmented) {
    const int within = (segment_of_block(p) - index) & ((1 << p.log2_segments) - 1);
    return (index << p.log2_segments) + within;
  } else {
    return index;
  }
}

// How many indices a thread block has. The last one may lie past the end.
template <class Config>
__device__ __forceinline__ int steps_of_block(const ConvParams& p) {
  if constexpr (Config::kSegmented) {
    return ((p.steps - 1) >> p.log2_segments) + 1;
  } else {
    return p.steps;
  }
}

// Whether the thread block adds the residual.
template <class Config>
__device__ __forceinline__ bool brings_residual(const ConvParams& p) {
  if constexpr (Config::kSegmented) {
    if (segment_of_block(p) != 0) return false;
  }
  return p.residual != nullptr;
}

}  // namespace spamm::kernels::conv::sm90
