// Starts the portable convolution: picks the instance for the tile.
#pragma once

#include "kernels/conv/sm80/conv.cuh"
#include "kernels/multiply/sm80/launch.cuh"

namespace spamm::kernels::sm80 {

template <class Engine, Tiles kTiles>
cudaError_t convolve(const ConvSm80Params<typename Engine::Sum>& p, const Launch& how) {
  const auto run = [&]<bool kLarge>(std::bool_constant<kLarge>) {
    using Config = ConvConfig<Engine, ShapeOf<kLarge ? kTiles.large : kTiles.small>>;
    const Im2colMatrix& m = p.pixels;
    const int64_t rows = int64_t{m.block_count()} << m.log2_block();
    const int64_t tiles =
        m.groups * ((rows - 1) / Config::kTileM + 1) * ((p.out_channels - 1) / Config::kTileN + 1);
    return start<Config>(conv_sm80<Config>, p, tiles, how);
  };
  return with_constants(run, how.tile == TileSize::kLarge);
}

}  // namespace spamm::kernels::sm80
