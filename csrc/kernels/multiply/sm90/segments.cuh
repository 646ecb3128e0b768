// Segments: the steps of a tile, dealt out to several thread blocks where C has too few tiles to
// fill the chip evenly. Each computes its sums of the whole tile; f64/join_segments.cuh adds them.
//
// Which step belongs to which segment follows from its number alone. So whether other blocks are
// skipped changes no bit, and neither does timing. Neighbouring steps go to different segments,
// because in a decay matrix the valid steps of a tile are neighbours.
#pragma once

#include "kernels/multiply/sm90/params.h"
#include "kernels/multiply/sm90/pipeline.cuh"

namespace spamm::kernels::multiply::sm90 {

// The number of a tile's segments, as a power of two.
template <class Config, class Norm>
__device__ __forceinline__ int log2_segments(const TiledProduct<Norm>& p) {
  return Config::kSegmented ? p.segments.log2_segments : 0;
}

template <class Config, class Norm>
__device__ __forceinline__ int batch_of(const TiledProduct<Norm>& p, const Tile& tile) {
  return tile.batch >> log2_segments<Config>(p);
}
template <class Config, class Norm>
__device__ __forceinline__ int batch_of(const TiledProduct<Norm>&, const CellTile<Config>&) {
  return 0;
}

// The number of a segment's step `index`, among all of its tile. From the number of its steps on,
// an index gives a number past the end.
template <class Config, class Norm>
__device__ __forceinline__ int step_number(const TiledProduct<Norm>& p, const Tile& tile,
                                           int index) {
  const int log2 = log2_segments<Config>(p);
  return (index << log2) + (tile.batch & ((1 << log2) - 1));
}

// The number of indices of a segment. The last one may lie past the end of all `steps`.
template <class Config, class Norm>
__device__ __forceinline__ int steps_of_segment(const TiledProduct<Norm>& p, int steps) {
  return ((steps - 1) >> log2_segments<Config>(p)) + 1;
}

}  // namespace spamm::kernels::multiply::sm90
