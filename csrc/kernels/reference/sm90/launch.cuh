// Starts Hopper's convolutions of deviations: encodes the tensor maps, picks the instance and sets
// the grid.
#pragma once

#include "kernels/conv/sm90/launch.cuh"
#include "kernels/reference/sm90/deviation.cuh"
#include "kernels/reference/sm90/strips.cuh"

namespace spamm::kernels::reference {

// Encodes the maps of output and base, and starts the kernel with these roles. The operands' maps
// are encoded.
template <class Roles>
cudaError_t start_deviations(void (*kernel)(DeviationParams), DeviationParams& p,
                             const Launch& how) {
  using Config = typename Roles::Config;
  const int blocks = std::min(p.tiles, how.multiprocessors);
  if (blocks == p.tiles) p.next_tile = nullptr;
  cudaError_t error = cudaSuccess;
  if (Config::kStoresZeros && p.phase_channels > 0) {
    error = encode_phases<typename Config::Element>(p);
  } else {
    error = encode_result<Config>(p.map_output, p, p.output, /*is_one=*/false);
  }
  if (error == cudaSuccess && p.base != nullptr) {
    error = encode_result<Config>(p.map_base, p, p.base, /*is_one=*/true);
  }
  if (error != cudaSuccess) return error;
  return conv::sm90::start<Roles>(kernel, p, blocks, /*cluster=*/0, how.stream);
}

template <class Element, TileConfig kTile>
cudaError_t convolve_boxes(DeviationParams p, const void* input, const void* weight,
                           const Launch& how) {
  using Chosen =
      DeviationConfig<Element, kTile.rows / kBlock, kTile.columns / kBlock, kTile.stages>;
  static_assert(kHasTile<Chosen, kTile>);
  cut_into_tiles<Chosen>(p, how.multiprocessors);
  const cudaError_t error = encode_operands<Chosen>(p, input, weight);
  if (error != cudaSuccess) return error;
  return start_deviations<ConvRoles<DeviationKernel<Chosen>>>(deviation_conv_sm90<Chosen>, p, how);
}

// For pairs of boxes, one above the other, that share strips. A stage has three kernel rows, so
// fewer of them hold as much.
template <class Element, TileConfig kTile>
cudaError_t convolve_strips(DeviationParams p, const void* input, const void* weight,
                            const Launch& how) {
  constexpr int kStages = 3;
  using Chosen = StripConfig<Element, kTile.rows / kBlock, kTile.columns / kBlock, kStages>;
  const int rows = ceil_div(p.boxes.rows, 2);
  p.images_fastest = false;
  p.by_box_rows = Divisor(rows);
  p.channel_tiles = ceil_div(p.shape.out_channels, Chosen::kRows * kBlock);
  p.by_channel_tiles = Divisor(p.channel_tiles);
  p.tiles = p.channel_tiles * ceil_div(p.boxes.images * rows * p.boxes.columns, Chosen::kBoxes / 2);
  const auto encode = [&](CUtensorMap& map, const void* data, int channels) {
    return encode_pixels<Element>(map, data, p.shape.input, channels, p.box, {1, 1},
                                  /*box_images=*/1, Strip::kPixelRows);
  };
  cudaError_t error = encode_weight_and_residual<Chosen>(p, weight);
  if (error == cudaSuccess)
    error = encode(p.map_input, input, p.shape.channels - p.second.channels);
  if (error == cudaSuccess && p.second.data != nullptr) {
    error = encode(p.map_second, p.second.data, p.second.channels);
  }
  if (error != cudaSuccess) return error;
  return start_deviations<ConvRoles<StripKernel<Chosen>>>(strip_conv_sm90<Chosen>, p, how);
}

// Like convolve() of conv/sm90/launch.cuh. The caller also sets base, base_activation, norm_pixels
// and by_strips, with it second, and of half types phase_channels. A pixel block lies in one image.
// Large tiles leave too few registers for the base, so the small one stands in.
template <class Element, Tiles kTiles>
cudaError_t convolve_deviations(DeviationParams p, const void* input, const void* weight,
                                const Launch& how) {
  conv::sm90::complete(p);
  const bool narrow = how.tile == TileSize::kNarrow;
  if constexpr (sizeof(Element) == 2) {
    if (p.by_strips) {
      return narrow ? convolve_strips<Element, kTiles.narrow>(p, input, weight, how)
                    : convolve_strips<Element, kTiles.small>(p, input, weight, how);
    }
  }
  return narrow ? convolve_boxes<Element, kTiles.narrow>(p, input, weight, how)
                : convolve_boxes<Element, kTiles.small>(p, input, weight, how);
}

}  // namespace spamm::kernels::reference
