// Starts the Hopper convolution: encodes the tensor maps, picks the instance and sets the grid.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <type_traits>

#include "kernels/common/launch.cuh"
#include "kernels/common/tensor_map_sm90.h"
#include "kernels/common/tile.h"
#include "kernels/conv/sm90/conv.cuh"

namespace spamm::kernels::conv::sm90 {

// The edge of a TMA box that loads 2^log2 entries, `step` apart, and its element stride.
inline uint32_t edge_of_box(int log2, int step) { return ((1 << log2) - 1) * step + 1; }
inline uint32_t every_of_box(int log2, int step) { return log2 == 0 ? 1 : step; }

// Encodes a map of channels-last images. A box has 128 bytes of channels and `box` pixels, which
// are `step` apart. `box_images`, if not 0, replaces its number of images.
template <class Element>
cudaError_t encode_pixels(CUtensorMap& map, const void* data, const Extent& extent, int channels,
                          const Log2Block& box, Size2 step, int box_images = 0) {
  const uint64_t line = channels * sizeof(Element);
  return kernels::sm90::encode_tensor_map<Element, 4>(
      map, data,
      {static_cast<uint64_t>(channels), static_cast<uint64_t>(extent.columns),
       static_cast<uint64_t>(extent.rows), static_cast<uint64_t>(extent.images)},
      {line, line * extent.columns, line * extent.columns * extent.rows},
      {kLineBytes / sizeof(Element), edge_of_box(box.columns, step.columns),
       edge_of_box(box.rows, step.rows),
       static_cast<uint32_t>(box_images > 0 ? box_images : 1 << box.images)},
      {1, every_of_box(box.columns, step.columns), every_of_box(box.rows, step.rows), 1});
}

template <class Element>
cudaError_t encode_weight(CUtensorMap& map, const void* data, const ConvShape& shape,
                          uint32_t out_channels) {
  const uint64_t line = shape.channels * sizeof(Element);
  const auto positions = static_cast<uint64_t>(shape.kernel.rows) * shape.kernel.columns;
  return kernels::sm90::encode_tensor_map<Element, 3>(
      map, data,
      {static_cast<uint64_t>(shape.channels), positions, static_cast<uint64_t>(shape.out_channels)},
      {line, line * positions}, {kLineBytes / sizeof(Element), 1, out_channels}, {1, 1, 1});
}

// Fills in the tiles of the output. Returns the number of thread blocks to start.
template <class Config>
int cut_into_tiles(ConvParams& p, int multiprocessors) {
  const int boxes = p.boxes.images * p.boxes.rows * p.boxes.columns;
  p.channel_tiles = ceil_div(p.shape.out_channels, Config::kRows * kBlock);
  p.by_channel_tiles = Divisor(p.channel_tiles);
  p.tiles = p.channel_tiles * ceil_div(boxes, Config::kBoxes);
  if (p.next_tile != nullptr) return std::min(p.tiles, multiprocessors);
  // Unclaimed tiles: if few multiprocessors stay idle so, each thread block has as many. Two are
  // opposite places (box_at), of which one often has a long list and the other a short one.
  const int even = ceil_div(p.tiles, ceil_div(p.tiles, multiprocessors));
  return 10 * even >= 9 * multiprocessors ? even : std::min(p.tiles, multiprocessors);
}

// Encodes the map of images like the output.
template <class Config>
cudaError_t encode_result(CUtensorMap& map, const ConvParams& p, const void* data) {
  return encode_pixels<typename Config::Element>(map, data, p.shape.output, p.shape.out_channels,
                                                 p.box, {1, 1});
}

template <class Config>
cudaError_t encode_operands(ConvParams& p, const void* input, const void* weight) {
  const auto encode = [&](CUtensorMap& map, int images) {
    return encode_pixels<typename Config::Operand>(map, input, p.shape.input, p.shape.channels,
                                                   p.box, p.shape.stride, images);
  };
  cudaError_t error = encode(p.map_input, 0);
  if (error == cudaSuccess && Config::is_narrow(1)) error = encode(p.map_last, Config::kLastWidth);
  if (error == cudaSuccess) {
    error = encode_weight<typename Config::Operand>(p.map_weight, weight, p.shape,
                                                    Config::kRows * kBlock);
  }
  if (error != cudaSuccess || p.residual == nullptr) return error;
  return encode_result<Config>(p.map_residual, p, p.residual);
}

// Starts the kernel with these roles, in clusters of thread blocks where `cluster` is not 0. The
// maps are encoded.
template <class Roles>
cudaError_t start(void (*kernel)(typename Roles::Params), const typename Roles::Params& p,
                  int blocks, int cluster, cudaStream_t stream) {
  using Config = typename Roles::Config;
  constexpr int kSharedBytes = sizeof(typename Roles::Storage);
  static_assert(kSharedBytes <= kMostSharedBytes);
  // The largest shared memory also lets thread blocks of the norm kernel fit beside these.
  const cudaError_t error =
      allow_shared_memory(reinterpret_cast<const void*>(kernel), kSharedBytes);
  if (error != cudaSuccess) return error;
  return launch_with(in_clusters(cluster), kernel, blocks, Config::kThreads, kSharedBytes,
                     /*overlap_previous=*/true, stream, p);
}

template <class Config>
cudaError_t convolve_staged(ConvParams p, const void* input, const void* weight,
                            const Launch& how) {
  using Roles = ConvRoles<BoxKernel<Config>>;
  constexpr int kReserved = 1024;  // by the driver, of each thread block
  static_assert((sizeof(typename Roles::Storage) + kReserved) * Config::kThreadBlocks <=
                kMostSharedBytes + kReserved);
  int blocks = cut_into_tiles<Config>(p, how.multiprocessors * Config::kThreadBlocks), cluster = 0;
  if constexpr (Config::kSegmented) {  // a tile for each cluster
    cluster = 1 << p.log2_segments;
    blocks = p.tiles;
  }
  if (blocks == p.tiles) p.next_tile = nullptr;
  cudaError_t error = encode_operands<Config>(p, input, weight);
  if (error == cudaSuccess) error = encode_result<Config>(p.map_output, p, p.output);
  if (error != cudaSuccess) return error;
  return start<Roles>(conv_sm90<Config>, p, blocks * std::max(cluster, 1), cluster, how.stream);
}

// Tells whether a Config agrees with its row of cuda/tiles.h.
template <class Config, TileConfig kTile>
constexpr bool kHasTile = Config::kRows* kBlock == kTile.rows&& Config::kBoxes* kBlock ==
                          kTile.columns&& kTile.warp_rows == kBlock&& kTile.warp_columns ==
                          2 * kBlock&& Config::kStages + Config::kStagings - 1 ==
                          kTile.stages&& kTile.blocks_per_multiprocessor == Config::kThreadBlocks;

template <class Element, TileConfig kTile, int kLastWidth, bool kByPixel = false,
          bool kSegmented = false>
constexpr auto staged() {
  // Layers of small tiles have few for each multiprocessor, so the end of a tile counts: a second
  // staging block is worth more than a sixth stage.
  constexpr bool kTwo = sizeof(Element) == 2 && kTile.stages == 6 && !kSegmented;
  constexpr int kStagings = kTwo ? 2 : 1;
  using Chosen = Config<Element, kTile.rows / kBlock, kTile.columns / kBlock, kLastWidth,
                        kTile.stages - kStagings + 1, kStagings, kByPixel, kSegmented>;
  static_assert(kHasTile<Chosen, kTile>);
  return convolve_staged<Chosen>;
}

// Fills in what follows from shape, block and log2_block_k.
inline void complete(ConvParams& p) {
  if (!p.by_pixel) p.box = box_of(p.block);
  p.blocks = count(p.shape.output, p.block);
  p.boxes = count(p.shape.output, p.box);
  const int norm_group = 1 << std::max(p.log2_block_k, 6);
  p.norm_groups = ceil_div(p.shape.channels, norm_group);
  p.box_groups = ceil_div(p.shape.channels, kBlock);
  p.steps = p.shape.kernel.rows * p.shape.kernel.columns * p.box_groups;
  p.by_box_images = Divisor(p.boxes.images);
  p.by_box_rows = Divisor(p.boxes.rows);
  p.by_box_columns = Divisor(p.boxes.columns);
  p.by_box_groups = Divisor(p.box_groups);
  p.by_kernel_columns = Divisor(p.shape.kernel.columns);
  // With two boxes of images, the second box of each pair holds the last images.
  p.images_fastest = p.boxes.images == 2;
}

// A batch of 100 has 36 images in the second box of a pair.
constexpr int kNarrowWidth = 40;

// Calls launch() with the width of that box as a constant.
template <class Launch>
cudaError_t with_last_width(const ConvParams& p, const Launch& launch) {
  const bool one_pixel = p.box.images == 6;
  const int last = p.shape.output.images - kBlock;
  const bool narrow = p.images_fastest && one_pixel;
  if (narrow && last <= kNarrowWidth) {
    return launch(std::integral_constant<int, kNarrowWidth>{});
  }
  return launch(std::integral_constant<int, kBlock>{});
}

// Computes p. The caller sets shape, block, by_pixel and its box, norms, log2_block_m and _k, tau,
// bias, residual, activation, output and next_tile. Returns the error of the driver or of the
// launch, as all launchers do. next_tile: an int in device memory that is zero. The kernel sets it
// back to zero. No other kernel in flight may use it. log2_segments, for half types in tiles that
// are not narrow: at most kLog2MostSegments.
template <class Element, Tiles kTiles>
cudaError_t convolve(ConvParams p, const void* input, const void* weight, const Launch& how) {
  complete(p);
  constexpr bool kByPixel = true, kSegmented = true;
  if (p.by_pixel) {  // all boxes have full width
    const cudaError_t error = launch_valid_pixels(p, how.stream);
    if (error != cudaSuccess) return error;
    const auto instance =
        p.log2_segments > 0 ? staged<Element, kTiles.medium, kBlock, kByPixel, kSegmented>()
        : how.tile == TileSize::kMedium ? staged<Element, kTiles.medium, kBlock, kByPixel>()
                                        : staged<Element, kTiles.narrow, kBlock, kByPixel>();
    return instance(p, input, weight, how);
  }
  if constexpr (sizeof(Element) == 2) {
    if (p.log2_segments > 0) {
      const auto instance = how.tile == TileSize::kLarge
                                ? staged<Element, kTiles.large, kBlock, !kByPixel, kSegmented>()
                                : staged<Element, kTiles.small, kBlock, !kByPixel, kSegmented>();
      return instance(p, input, weight, how);
    }
  }
  return with_last_width(p, [&]<int kWidth>(std::integral_constant<int, kWidth>) {
    const auto instance = how.tile == TileSize::kSmall   ? staged<Element, kTiles.small, kWidth>()
                          : how.tile == TileSize::kLarge ? staged<Element, kTiles.large, kWidth>()
                                                         : staged<Element, kTiles.narrow, kWidth>();
    return instance(p, input, weight, how);
  });
}

}  // namespace spamm::kernels::conv::sm90
