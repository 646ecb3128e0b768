// Products of 32 x 32 sub-tiles of float32 by FFMA. The lanes of a warp form a 4 x 8 grid, and each
// owns 8 x 4 entries of a sub-tile. Sums over a stretch of K are added to separate totals: two
// short chains of roundings are more accurate than one as long as K.
#pragma once

#include <cstdint>

#include "kernels/multiply/sm80/stage.cuh"

namespace spamm::kernels {

struct SimtF32Engine {
  using Element = float;
  using Sum = float;
  static constexpr int kStretch = 4;  // in steps, 32 of K each
  static constexpr int kRowsOwned = 8, kColumnsOwned = 4, kLaneRows = 4, kLaneColumns = 8;

  struct SubTile {
    Sum sums[kRowsOwned][kColumnsOwned] = {};
    Sum totals[kRowsOwned][kColumnsOwned] = {};
  };

  template <bool kAll, class TileA, class TileB, int kRows, int kColumns>
  __device__ static void multiply_stage(SubTile (&acc)[kRows][kColumns], const char* stage_a,
                                        const char* stage_b, int row, int column, uint32_t mask) {
    const auto place_a = place<TileA>(row, threadIdx.x % 32 / kLaneColumns);
    const auto place_b = place<TileB>(column, threadIdx.x % kLaneColumns);
#pragma unroll 1  // unrolling would need registers that the two sets of sums occupy
    for (int k = 0; k < TileA::kDepth; k += 4) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        float a[kRowsOwned][4];
        load<TileA, kLaneRows>(a, stage_a, place_a, 32 * r, k);
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
          if (!kAll && !(mask >> (r * kColumns + c) & 1)) continue;
          float b[kColumnsOwned][4];
          load<TileB, kLaneColumns>(b, stage_b, place_b, 32 * c, k);
#pragma unroll
          for (int q = 0; q < 4; ++q) {
#pragma unroll
            for (int i = 0; i < kRowsOwned; ++i) {
#pragma unroll
              for (int j = 0; j < kColumnsOwned; ++j) {
                float& sum = acc[r][c].sums[i][j];
                sum = fmaf(a[i][q], b[j][q], sum);
              }
            }
          }
        }
      }
    }
  }

  // Must be called before each step. Stretches begin at fixed places of K, so a sum does not depend
  // on which other steps are listed.
  template <int kRows, int kColumns>
  __device__ static void begin_step(SubTile (&acc)[kRows][kColumns], int step, int previous) {
    if (step / kStretch == previous / kStretch) return;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
#pragma unroll
        for (int i = 0; i < kRowsOwned; ++i) {
#pragma unroll
          for (int j = 0; j < kColumnsOwned; ++j) {
            acc[r][c].totals[i][j] += acc[r][c].sums[i][j];
            acc[r][c].sums[i][j] = 0;
          }
        }
      }
    }
  }

  // Calls store(row, column, sums of neighbouring columns) for all sums of this thread.
  template <class TileA, class TileB, class Store>
  __device__ static void for_each(const SubTile& tile, const Store& store) {
    const int lane_row = threadIdx.x % 32 / kLaneColumns, lane_column = threadIdx.x % kLaneColumns;
#pragma unroll
    for (int i = 0; i < kRowsOwned; ++i) {
      Sum sums[kColumnsOwned];
#pragma unroll
      for (int j = 0; j < kColumnsOwned; ++j) sums[j] = tile.totals[i][j] + tile.sums[i][j];
      const int row = owned<TileA, kLaneRows>(lane_row, i);
      if constexpr (TileB::kKMajor) {
#pragma unroll
        for (int j = 0; j < kColumnsOwned; ++j) {
          const Sum one[1] = {sums[j]};
          store(row, owned<TileB, kLaneColumns>(lane_column, j), one);
        }
      } else {
        store(row, owned<TileB, kLaneColumns>(lane_column, 0), sums);
      }
    }
  }

 private:
  // The i-th row (or column) that a lane owns. If chunks run along K, a lane owns every kLanes-th
  // row; else it owns groups of four neighbours, which make one chunk.
  template <class Tile, int kLanes>
  __device__ static int owned(int lane, int i) {
    return Tile::kKMajor ? lane + kLanes * i : (lane + i / 4 * kLanes) * 4 + i % 4;
  }

  // The first chunk that a lane reads of the 32 rows (or columns) that start at `mn`.
  template <class Tile>
  __device__ static typename Tile::Place place(int mn, int lane) {
    if constexpr (Tile::kKMajor) {
      return {mn + lane, 0};
    } else {
      return {0, mn / 4 + lane};
    }
  }

  // Loads the lane's entries of the 32 rows (or columns) `mn` after `place`, for four k from `k`.
  template <class Tile, int kLanes, int kOwned>
  __device__ static void load(float (&x)[kOwned][4], const char* stage,
                              const typename Tile::Place& place, int mn, int k) {
    if constexpr (Tile::kKMajor) {
#pragma unroll
      for (int i = 0; i < kOwned; ++i) {
        const auto chunk = chunk_at(stage + place.offset(mn + kLanes * i, k / 4));
        x[i][0] = chunk.x, x[i][1] = chunk.y, x[i][2] = chunk.z, x[i][3] = chunk.w;
      }
    } else {
#pragma unroll
      for (int q = 0; q < 4; ++q) {
#pragma unroll
        for (int i = 0; i < kOwned; i += 4) {
          const auto chunk = chunk_at(stage + place.offset(k + q, mn / 4 + kLanes * (i / 4)));
          x[i][q] = chunk.x, x[i + 1][q] = chunk.y, x[i + 2][q] = chunk.z, x[i + 3][q] = chunk.w;
        }
      }
    }
  }

  __device__ static float4 chunk_at(const char* address) {
    return *reinterpret_cast<const float4*>(address);
  }
};

}  // namespace spamm::kernels
