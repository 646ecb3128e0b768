// Starts the Hopper convolution: encodes the tensor maps, picks the instance and sets the grid.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <type_traits>

#include "kernels/common/launch.cuh"
#include "kernels/common/launch_clusters.cuh"
#include "kernels/common/shared_memory.h"
#include "kernels/common/tensor_map_sm90.h"
#include "kernels/common/tile.h"
#include "kernels/conv/sm90/conv.cuh"
#include "kernels/conv/sm90/resident.cuh"

namespace spamm::kernels::conv::sm90 {

// The edge of a TMA box that loads 2^log2 entries, `step` apart, and its element stride.
inline uint32_t edge_of_box(int log2, int step) { return ((1 << log2) - 1) * step + 1; }
inline uint32_t every_of_box(int log2, int step) { return log2 == 0 ? 1 : step; }

// Encodes a map of channels-last images. A box has 128 bytes of channels and `box` pixels, which
// are `step` apart. `box_images` and `box_rows`, if not 0, replace its number of images and rows.
template <class Element>
cudaError_t encode_pixels(CUtensorMap& map, const void* data, const Extent& extent, int channels,
                          const Log2Block& box, Size2 step, int box_images = 0, int box_rows = 0) {
  const uint64_t line = channels * sizeof(Element);
  return kernels::sm90::encode_tensor_map<Element, 4>(
      map, data,
      {static_cast<uint64_t>(channels), static_cast<uint64_t>(extent.columns),
       static_cast<uint64_t>(extent.rows), static_cast<uint64_t>(extent.images)},
      {line, line * extent.columns, line * extent.columns * extent.rows},
      {kLineBytes / sizeof(Element), edge_of_box(box.columns, step.columns),
       box_rows > 0 ? static_cast<uint32_t>(box_rows) : edge_of_box(box.rows, step.rows),
       static_cast<uint32_t>(box_images > 0 ? box_images : 1 << box.images)},
      {1, every_of_box(box.columns, step.columns), every_of_box(box.rows, step.rows), 1});
}

// Encodes the maps of the input.
template <class Config>
cudaError_t encode_input(ConvParams& p, const void* input) {
  using Operand = typename Config::Operand;
  if constexpr (Config::kStrips) {
    const auto encode = [&](CUtensorMap& map, const void* data, int channels) {
      return encode_pixels<Operand>(map, data, p.shape.input, channels, p.box, {1, 1},
                                    /*box_images=*/1, Strip::kPixelRows);
    };
    const cudaError_t error = encode(p.map_input[0], input, p.shape.channels - p.second.channels);
    if (error != cudaSuccess || p.second.data == nullptr) return error;
    return encode(p.map_input[1], p.second.data, p.second.channels);
  }
  const cudaError_t error = encode_pixels<Operand>(p.map_input[0], input, p.shape.input,
                                                   p.shape.channels, p.box, p.shape.stride);
  if (error != cudaSuccess || !Config::is_narrow(1)) return error;
  return encode_pixels<Operand>(p.map_last, input, p.shape.input, p.shape.channels, p.box,
                                p.shape.stride, Config::kLastWidth);
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
  return std::min(p.tiles, multiprocessors);
}

template <class Config>
cudaError_t encode_output(ConvParams& p) {
  using Element = typename Config::Element;
  const Extent& output = p.shape.output;
  if constexpr (Config::kPools) {
    const Extent pooled = {output.images, output.rows / 2, output.columns / 2};
    return encode_pixels<Element>(p.map_output, p.output, pooled, p.shape.out_channels, p.box,
                                  {1, 1}, images_of_store<Config>(p));
  }
  if constexpr (Config::kStoresZeros) {
    if (p.phase_channels > 0) return encode_phases<Element>(p);
  }
  return encode_pixels<Element>(p.map_output, p.output, output, p.shape.out_channels, p.box,
                                {1, 1});
}

// Encodes the tensor maps of p and starts the kernel.
template <class Config>
cudaError_t start(void (*kernel)(ConvParams), int shared_bytes, ConvParams p, const void* input,
                  const void* weight, int blocks, cudaStream_t stream) {
  using Element = typename Config::Element;
  using Operand = typename Config::Operand;
  if (blocks == p.tiles) p.next_tile = nullptr;
  cudaError_t error = encode_input<Config>(p, input);
  if (error == cudaSuccess) error = encode_output<Config>(p);
  if (error == cudaSuccess && p.residual != nullptr) {
    Extent extent = p.shape.output;
    if (p.residual_is_shared) extent.images = 1;
    error = encode_pixels<Element>(p.map_residual, p.residual, extent, p.shape.out_channels, p.box,
                                   {1, 1});
  }
  if (error == cudaSuccess && p.base != nullptr) {
    const Extent image = {1, p.shape.output.rows, p.shape.output.columns};
    error = encode_pixels<Element>(p.map_base, p.base, image, p.shape.out_channels, p.box, {1, 1});
  }
  if (error == cudaSuccess) {
    error = encode_weight<Operand>(p.map_weight, weight, p.shape, Config::kRows * kBlock);
  }
  if (error != cudaSuccess) return error;

  // The largest shared memory also lets thread blocks of the norm kernel fit beside these.
  error = allow_shared_memory(reinterpret_cast<const void*>(kernel), shared_bytes);
  if (error != cudaSuccess) return error;
  if constexpr (Config::kSegmented) {
    // Pooled windows have their two tiles in one cluster.
    const unsigned cluster = (Config::kPools ? 2u : 1u) << p.log2_segments;
    return launch_clusters(kernel, blocks << p.log2_segments, cluster, Config::kThreads,
                           shared_bytes, stream, p);
  }
  return launch(kernel, blocks, Config::kThreads, shared_bytes, /*overlap_previous=*/true, stream,
                p);
}

template <class Config>
cudaError_t convolve_staged(ConvParams p, const void* input, const void* weight,
                            const Launch& how) {
  constexpr int kSharedBytes = sizeof(Storage<Config>);
  static_assert(kSharedBytes <= kMostSharedBytes);
  int blocks = cut_into_tiles<Config>(p, how.multiprocessors);
  if (Config::kSegmented) blocks = p.tiles;  // clusters, with a tile each
  return start<Config>(conv_sm90<Config>, kSharedBytes, p, input, weight, blocks, how.stream);
}

// For pairs of boxes, one above the other, that share strips.
template <class Config>
cudaError_t convolve_strips(ConvParams p, const void* input, const void* weight,
                            const Launch& how) {
  constexpr int kSharedBytes = sizeof(Storage<Config>);
  static_assert(kSharedBytes <= kMostSharedBytes);
  const int rows = ceil_div(p.boxes.rows, 2);
  p.images_fastest = false;
  p.by_box_rows = Divisor(rows);
  p.channel_tiles = ceil_div(p.shape.out_channels, Config::kRows * kBlock);
  p.by_channel_tiles = Divisor(p.channel_tiles);
  p.tiles = p.channel_tiles * ceil_div(p.boxes.images * rows * p.boxes.columns, Config::kBoxes / 2);
  return start<Config>(conv_sm90<Config>, kSharedBytes, p, input, weight,
                       std::min(p.tiles, how.multiprocessors), how.stream);
}

template <class Config>
cudaError_t convolve_resident(ConvParams p, const void* input, const void* weight,
                              const Launch& how) {
  constexpr int kSharedBytes = sizeof(ResidentStorage<Config>);
  static_assert(kSharedBytes <= kMostSharedBytes - 2048);  // the rest is for the norm kernel
  const int pairs = ceil_div(p.boxes.columns, 2), rows = p.boxes.rows / Config::kRowsInTurn;
  p.by_box_columns = Divisor(pairs);
  p.by_box_rows = Divisor(rows);
  p.tiles = p.boxes.images / 2 * rows * pairs;
  return start<Config>(conv_resident_sm90<Config>, kSharedBytes, p, input, weight,
                       std::min(p.tiles, how.multiprocessors), how.stream);
}

// For windows of 2 x 2 pixels that are max-pooled.
template <class Config>
cudaError_t convolve_and_pool_staged(ConvParams p, const void* input, const void* weight,
                                     const Launch& how) {
  constexpr int kSharedBytes = sizeof(Storage<Config>);
  static_assert(kSharedBytes <= kMostSharedBytes);
  const int rows = p.boxes.rows / 2, columns = p.boxes.columns / 2;
  p.by_box_rows = Divisor(rows);
  p.by_box_columns = Divisor(columns);
  p.channel_tiles = ceil_div(p.shape.out_channels, Config::kRows * kBlock);
  p.by_channel_tiles = Divisor(p.channel_tiles);
  p.tiles = p.channel_tiles * p.boxes.images * rows * columns * (4 / Config::kBoxes);
  // Clusters have a tile for each row of a window.
  const int blocks = Config::kSegmented ? p.tiles : std::min(p.tiles, how.multiprocessors);
  return start<Config>(conv_sm90<Config>, kSharedBytes, p, input, weight, blocks, how.stream);
}

// Whether a Config agrees with its row of cuda/tiles.h.
template <class Config, TileConfig kTile>
constexpr bool kHasTile =
    Config::kRows* kBlock == kTile.rows&& Config::kBoxes* kBlock ==
    kTile.columns&& kTile.warp_rows == kBlock&& kTile.warp_columns ==
    2 * kBlock&& Config::kStages == kTile.stages&& kTile.blocks_per_multiprocessor == 1;

template <class Element, TileConfig kTile, int kLastWidth>
constexpr auto staged() {
  using Chosen =
      Config<Element, kTile.rows / kBlock, kTile.columns / kBlock, kLastWidth, kTile.stages>;
  static_assert(kHasTile<Chosen, kTile>);
  return convolve_staged<Chosen>;
}

// The kernel for few output channels. For half types it keeps the weights in shared memory if it
// can.
template <class Element, TileConfig kTile, int kLastWidth>
cudaError_t convolve_narrow(ConvParams p, const void* input, const void* weight,
                            const Launch& how) {
  if constexpr (sizeof(Element) == 2) {
    using Resident = ResidentConfig<Element, kLastWidth>;
    static_assert(kHasTile<Resident, kTile>);
    if (takes_resident(p.shape, p.block) && p.residual == nullptr) {
      return convolve_resident<Resident>(p, input, weight, how);
    }
    return staged<Element, kTile, kBlock>()(p, input, weight, how);
  } else {
    return staged<Element, kTile, kLastWidth>()(p, input, weight, how);
  }
}

// The kernels for boxes whose pixels are judged one by one.
template <class Element, TileConfig kTile, bool kSegmented = false>
constexpr auto by_pixel() {
  using Chosen =
      ConfigByPixel<Element, kTile.rows / kBlock, kTile.columns / kBlock, kTile.stages, kSegmented>;
  static_assert(kHasTile<Chosen, kTile>);
  return convolve_staged<Chosen>;
}

// The kernels for tiles whose steps are cut into segments. All boxes have full width.
template <class Element, TileConfig kTile>
constexpr auto segmented() {
  using Chosen =
      SegmentedConfig<Element, kTile.rows / kBlock, kTile.columns / kBlock, kTile.stages>;
  static_assert(kHasTile<Chosen, kTile>);
  return convolve_staged<Chosen>;
}

// The kernels for deviations from a reference.
template <class Element, TileConfig kTile>
constexpr auto deviating() {
  using Chosen =
      DeviationConfig<Element, kTile.rows / kBlock, kTile.columns / kBlock, kTile.stages>;
  static_assert(kHasTile<Chosen, kTile>);
  return convolve_staged<Chosen>;
}

// The same by strips. A stage has three kernel rows, so fewer of them hold as much.
template <class Element, TileConfig kTile>
constexpr auto by_strips() {
  constexpr int kStages = 3;
  return convolve_strips<
      StripConfig<Element, kTile.rows / kBlock, kTile.columns / kBlock, kStages>>;
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

// Calls launch() with the width of the second box of a pair as a constant.
template <class Launch>
cudaError_t with_last_width(const ConvParams& p, const Launch& launch) {
  const bool one_pixel = p.box.images == 6;
  const int last = p.shape.output.images - kBlock;
  const bool narrow = p.images_fastest && one_pixel;
  switch (narrow ? ceil_div(last, 8) * 8 : kBlock) {
    case 8:
      return launch(std::integral_constant<int, 8>{});
    case 16:
      return launch(std::integral_constant<int, 16>{});
    case 24:
      return launch(std::integral_constant<int, 24>{});
    case 32:
      return launch(std::integral_constant<int, 32>{});
    case 40:
      return launch(std::integral_constant<int, 40>{});
    case 48:
      return launch(std::integral_constant<int, 48>{});
    case 56:
      return launch(std::integral_constant<int, 56>{});
    default:
      return launch(std::integral_constant<int, 64>{});
  }
}

// Computes p. The caller sets shape, block, by_pixel and its box, norms, log2_block_m and _k,
// weight_is_ready, tau, bias, residual, activation, output and next_tile. Returns the error of the
// driver or of the launch, as all launchers do. next_tile: an int in device memory that is zero.
// The kernel sets it back to zero. No other kernel in flight may use it. log2_segments, for half
// types in tiles that are not narrow: at most kLog2MostSegments.
template <class Element, Tiles kTiles>
cudaError_t convolve(ConvParams p, const void* input, const void* weight, const Launch& how) {
  complete(p);
  if constexpr (sizeof(Element) == 2) {
    if (p.log2_segments > 0) {
      const auto instance = p.by_pixel ? by_pixel<Element, kTiles.small, /*kSegmented=*/true>()
                            : how.tile == TileSize::kLarge ? segmented<Element, kTiles.large>()
                                                           : segmented<Element, kTiles.small>();
      return instance(p, input, weight, how);
    }
    if (p.by_pixel) {
      const auto instance = how.tile == TileSize::kNarrow ? by_pixel<Element, kTiles.narrow>()
                                                          : by_pixel<Element, kTiles.small>();
      return instance(p, input, weight, how);
    }
  }
  return with_last_width(p, [&]<int kWidth>(std::integral_constant<int, kWidth>) {
    const auto instance = how.tile == TileSize::kSmall ? staged<Element, kTiles.small, kWidth>()
                          : how.tile == TileSize::kLarge
                              ? staged<Element, kTiles.large, kWidth>()
                              : convolve_narrow<Element, kTiles.narrow, kWidth>;
    return instance(p, input, weight, how);
  });
}

// The same for deviations from a reference: the caller also sets base, base_activation, norm_pixels
// and by_strips, with it second, and of half types phase_channels. A pixel block lies in one image.
template <class Element, Tiles kTiles>
cudaError_t convolve_deviations(ConvParams p, const void* input, const void* weight,
                                const Launch& how) {
  complete(p);
  if constexpr (sizeof(Element) == 2) {
    if (p.by_strips) {
      const auto instance = how.tile == TileSize::kNarrow ? by_strips<Element, kTiles.narrow>()
                                                          : by_strips<Element, kTiles.small>();
      return instance(p, input, weight, how);
    }
  }
  // Large tiles leave too few registers for the base.
  const auto instance = how.tile == TileSize::kNarrow ? deviating<Element, kTiles.narrow>()
                                                      : deviating<Element, kTiles.small>();
  return instance(p, input, weight, how);
}

template <class Element, TileConfig kTile>
constexpr auto pooling() {
  using Chosen = PoolConfig<Element, kTile.rows / kBlock, kTile.columns / kBlock, kTile.stages>;
  static_assert(kHasTile<Chosen, kTile>);
  return convolve_and_pool_staged<Chosen>;
}

// The same with ReLU and max pooling of windows of 2 x 2 pixels, with stride 2: `output` is the
// pooled one. Half types; a pixel block is 64 images of one pixel; rows and columns of the
// convolution's output are even; no residual, no output norms.
template <class Element, Tiles kTiles>
cudaError_t convolve_and_pool(ConvParams p, const void* input, const void* weight,
                              const Launch& how) {
  complete(p);
  if (how.tile == TileSize::kNarrow) {
    return takes_resident(p.shape, p.block)
               ? convolve_resident<ResidentConfig<Element, kBlock, /*kPools=*/true>>(p, input,
                                                                                     weight, how)
               : pooling<Element, kTiles.narrow>()(p, input, weight, how);
  }
  const bool large = how.tile == TileSize::kLarge && p.log2_segments == 0;
  const auto instance = large ? pooling<Element, kTiles.large>() : pooling<Element, kTiles.small>();
  return instance(p, input, weight, how);
}

}  // namespace spamm::kernels::conv::sm90
