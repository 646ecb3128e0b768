// Starts the multiply for sm_80 and newer: from run-time memory orders and tile to an instance.
#pragma once

#include <algorithm>

#include "kernels/common/constants.h"
#include "kernels/common/launch.cuh"
#include "kernels/common/tile.h"
#include "kernels/multiply/sm80/multiply.cuh"

namespace spamm::kernels::sm80 {

template <TileConfig kTile>
using ShapeOf = TileShape<kTile.rows, kTile.columns, kTile.warp_rows, kTile.warp_columns,
                          kTile.stages, kTile.blocks_per_multiprocessor>;

// Starts as many thread blocks as there are tiles, or as the chip holds.
template <class Config, class Params>
cudaError_t start(void (*kernel)(Params), const Params& params, int64_t tiles, const Launch& how) {
  constexpr int kSharedBytes = sizeof(typename Config::Storage);
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (error != cudaSuccess) return error;
  const int64_t resident = int64_t{how.multiprocessors} * Config::kBlocksPerSm;
  return launch(kernel, static_cast<unsigned>(std::min(tiles, resident)), Config::kThreads,
                kSharedBytes, /*overlap_previous=*/false, how.stream, params);
}

// Computes p. Returns what the driver or the launch says, as all launchers do.
template <class Engine, Tiles kTiles>
cudaError_t multiply(const MultiplyParams<typename Engine::Sum>& p, const Launch& how) {
  const auto run = [&]<bool kAlongA, bool kAlongB, bool kLarge>(std::bool_constant<kAlongA>,
                                                                std::bool_constant<kAlongB>,
                                                                std::bool_constant<kLarge>) {
    using Shape = ShapeOf<kLarge ? kTiles.large : kTiles.small>;
    using Config = MultiplyConfig<Engine, Shape, kAlongA, kAlongB>;
    const int64_t tiles =
        p.batch * ((p.m - 1) / Config::kTileM + 1) * ((p.n - 1) / Config::kTileN + 1);
    return start<Config>(multiply_sm80<Config>, p, tiles, how);
  };
  return with_constants(run, p.a.k_major, p.b.k_major, how.tile == TileSize::kLarge);
}

}  // namespace spamm::kernels::sm80
