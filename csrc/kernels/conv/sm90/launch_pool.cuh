// Starts the Hopper convolution with max pooling of windows of 2 x 2 pixels.
#pragma once

#include "kernels/conv/sm90/launch.cuh"
#include "kernels/conv/sm90/pool_windows.cuh"

namespace spamm::kernels::conv::sm90 {

inline Extent pooled(const Extent& output) {
  return {output.images, output.rows / 2, output.columns / 2};
}

template <class Config>
cudaError_t convolve_and_pool_staged(ConvParams p, const void* input, const void* weight,
                                     const Launch& how) {
  const int rows = p.boxes.rows / 2, columns = p.boxes.columns / 2;
  p.by_box_rows = Divisor(rows);
  p.by_box_columns = Divisor(columns);
  p.channel_tiles = ceil_div(p.shape.out_channels, Config::kRows * kBlock);
  p.by_channel_tiles = Divisor(p.channel_tiles);
  p.tiles = p.channel_tiles * p.boxes.images * rows * columns * (4 / Config::kBoxes);
  // A cluster has a tile for each row of a window.
  const int segments = Config::kSegmented ? 1 << p.log2_segments : 1;
  const int cluster = Config::kSegmented ? 2 * segments : 0;
  const int blocks = Config::kSegmented ? p.tiles : std::min(p.tiles, how.multiprocessors);
  if (blocks == p.tiles) p.next_tile = nullptr;
  cudaError_t error = encode_operands<Config>(p, input, weight);
  if (error == cudaSuccess) {  // a warpgroup stores its images of pooled values at a time
    error = encode_pixels<typename Config::Element>(p.map_output, p.output, pooled(p.shape.output),
                                                    p.shape.out_channels, p.box, {1, 1},
                                                    kBlock / 2 / segments);
  }
  if (error != cudaSuccess) return error;
  return start<ConvRoles<PoolKernel<Config>>>(conv_pool_sm90<Config>, p, blocks * segments, cluster,
                                              how.stream);
}

template <class Element, TileConfig kTile>
constexpr auto pooling() {
  using Chosen = PoolConfig<Element, kTile.rows / kBlock, kTile.columns / kBlock, kTile.stages>;
  static_assert(kHasTile<Chosen, kTile>);
  return convolve_and_pool_staged<Chosen>;
}

// Like convolve(), with ReLU and max pooling with stride 2: `output` is the pooled one. Half types;
// a pixel block is 64 images of one pixel; rows and columns of the convolution's output are even;
// no residual, no output norms.
template <class Element, Tiles kTiles>
cudaError_t convolve_and_pool(ConvParams p, const void* input, const void* weight,
                              const Launch& how) {
  complete(p);
  if (how.tile == TileSize::kNarrow && takes_resident(p.shape, p.block)) {
    using Resident = ResidentConfig<Element, kBlock, /*kRowsInTurn=*/2>;
    return convolve_resident<Resident, ResidentPoolWork<Resident>>(p, input, weight,
                                                                   pooled(p.shape.output), how);
  }
  const bool large = how.tile == TileSize::kLarge && p.log2_segments == 0;
  const auto instance = how.tile == TileSize::kNarrow ? pooling<Element, kTiles.narrow>()
                        : large                       ? pooling<Element, kTiles.large>()
                                                      : pooling<Element, kTiles.small>();
  return instance(p, input, weight, how);
}

}  // namespace spamm::kernels::conv::sm90
