// Starts the Hopper convolution of split operands: picks the instance and sets the grid.
#pragma once

#include "kernels/conv/sm90/launch.cuh"
#include "kernels/conv/sm90/split.cuh"

namespace spamm::kernels::conv::sm90 {

template <class Config>
cudaError_t convolve_split_in(ConvParams p, const Launch& how) {
  const auto kernel = conv_split_sm90<Config>;
  constexpr int kSharedBytes = sizeof(Storage<Config>);
  static_assert(kSharedBytes <= kMostSharedBytes);
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (error != cudaSuccess) return error;
  const int blocks = cut_into_tiles<Config>(p, how.multiprocessors);
  if (blocks == p.tiles) p.next_tile = nullptr;
  return launch(kernel, blocks, Config::kThreads, kSharedBytes, /*overlap_previous=*/true,
                how.stream, p);
}

// Like convolve(), but the caller also sets a and b of p, and a pixel block is one pixel of several
// images.
template <Tiles kTiles>
cudaError_t convolve_split(ConvParams p, const Launch& how) {
  complete(p);
  return with_last_width(p, [&]<int kWidth>(std::integral_constant<int, kWidth>) {
    constexpr TileConfig kTile = kTiles.small;
    using Chosen = SplitConfig<kTile.rows / kBlock, kTile.columns / kBlock, kWidth, kTile.stages>;
    static_assert(kHasTile<Chosen, kTile>);
    return convolve_split_in<Chosen>(p, how);
  });
}

}  // namespace spamm::kernels::conv::sm90
