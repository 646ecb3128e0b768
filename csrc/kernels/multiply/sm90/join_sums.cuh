// Adds up the sums of a tile's segments (segments.cuh) where these are float32.
//
// Every warp leaves its own sums in memory that is mostly in the L2 cache. The one of all segments
// that comes last adds all, in the order of the segments, so the result does not depend on timing,
// and no warp waits for another.
#pragma once

#include <cstdint>

#include "kernels/multiply/sm90/params.h"
#include "kernels/multiply/sm90/segments.cuh"

namespace spamm::kernels::multiply::sm90 {

// Whether this warp is the last of its piece of C: `sums` are then those of all segments. `warp`
// counts the multiplying warps; `row` and `column` are its first block in the tile. All lanes call
// it together. Of what lies outside C nothing is left, and nothing is to be stored.
template <class Config, int kSize>
__device__ __forceinline__ bool join_sums(const TiledProduct<float>& p, const Tile& tile, int warp,
                                          int row, int column, float (&sums)[kSize]) {
  constexpr int kWarps = 4 * Config::kWarpgroups, kVectors = kSize / 4;
  constexpr int kWarpRows = kBlock / 4;
  if ((tile.row + row) * kBlock + warp % 4 * kWarpRows >= p.product.m ||
      (tile.column + column) * kBlock >= p.product.n) {
    return false;
  }
  const auto tiles_along = [](int64_t size, int blocks) {
    return static_cast<int>((size - 1) / (kBlock * blocks)) + 1;
  };
  const int log2 = p.segments.log2_segments, segments = 1 << log2;
  const int batch = tile.batch >> log2, segment = tile.batch & (segments - 1);
  const int tile_row = batch * tiles_along(p.product.m, Config::kRows) + tile.row / Config::kRows;
  const int number =
      tile_row * tiles_along(p.product.n, Config::kColumns) + tile.column / Config::kColumns;
  const int64_t piece = static_cast<int64_t>(number) * kWarps + warp;
  const int lane = threadIdx.x % 32;
  float4* const all = reinterpret_cast<float4*>(p.segments.sums) + (piece << log2) * kVectors * 32;
  float4* const own = all + segment * kVectors * 32 + lane;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    __stcg(own + i * 32, float4{sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]});
  }
  __threadfence();  // what a lane has written comes before the count
  __syncwarp();
  unsigned before = 0;
  if (lane == 0) before = atomicAdd(p.segments.meetings + piece, 1u);
  if (__shfl_sync(~0u, before, 0) + 1 != static_cast<unsigned>(segments)) return false;
  __threadfence();  // and what the others have written after it
#pragma unroll
  for (int i = 0; i < kSize; ++i) sums[i] = 0;
#pragma unroll 1
  for (int s = 0; s < segments; ++s) {
    const float4* const from = all + s * kVectors * 32 + lane;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const float4 x = __ldcg(from + i * 32);
      sums[4 * i] += x.x, sums[4 * i + 1] += x.y, sums[4 * i + 2] += x.z, sums[4 * i + 3] += x.w;
    }
  }
  return true;
}

}  // namespace spamm::kernels::multiply::sm90
