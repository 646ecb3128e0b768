// Starts the portable multiply: picks the instance for the memory orders and the tile.
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

// Starts a thread block for each tile, but no more than the chip can hold at a time.
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

// Computes p. Returns the error of the driver or of the launch, as all launchers do.
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
