// Starts Hopper's convolution where nothing is skipped.
#pragma once

#include "kernels/conv/sm90/launch.cuh"
#include "kernels/conv/sm90/unskipped.cuh"

namespace spamm::kernels::conv::sm90 {

// Encodes a map of all pixels of channels-last images in the order of memory.
template <class Element>
cudaError_t encode_lines(CUtensorMap& map, const void* data, int channels, int pixels,
                         uint32_t box_pixels) {
  return kernels::sm90::encode_tensor_map<Element, 2>(
      map, data, {static_cast<uint64_t>(channels), static_cast<uint64_t>(pixels)},
      {channels * sizeof(Element)}, {kLineBytes / sizeof(Element), box_pixels}, {1, 1});
}

// Encodes a map of the pixels that consecutive output pixels read.
template <class Element>
cudaError_t encode_windows_of_pixels(CUtensorMap& map, const void* data, const ConvShape& shape,
                                     uint32_t pixels) {
  const Extent& input = shape.input;
  const uint64_t line = shape.channels * sizeof(Element);
  const auto past = [](int kernel, int dilation, int padding) {
    return padding - (kernel - 1) * dilation;
  };
  return kernels::sm90::encode_im2col_map<Element>(
      map, data,
      {static_cast<uint64_t>(shape.channels), static_cast<uint64_t>(input.columns),
       static_cast<uint64_t>(input.rows), static_cast<uint64_t>(input.images)},
      {line, line * input.columns, line * input.columns * input.rows},
      {-shape.padding.columns, -shape.padding.rows},
      {past(shape.kernel.columns, shape.dilation.columns, shape.padding.columns),
       past(shape.kernel.rows, shape.dilation.rows, shape.padding.rows)},
      pixels,
      {static_cast<uint32_t>(shape.stride.columns), static_cast<uint32_t>(shape.stride.rows)});
}

template <class Config>
cudaError_t convolve_unskipped(UnskippedParams p, const void* input, const void* weight,
                               int multiprocessors, cudaStream_t stream) {
  using Element = typename Config::Element;
  using Operand = typename Config::Operand;
  const ConvShape& shape = p.shape;
  const int pixels = shape.output.images * shape.output.rows * shape.output.columns;
  p.box_groups = ceil_div(shape.channels, Config::kDepth);
  p.steps = shape.kernel.rows * shape.kernel.columns * p.box_groups;
  p.by_box_rows = Divisor(shape.output.rows);
  p.by_box_columns = Divisor(shape.output.columns);
  p.in_order = reads_pixels_in_order(shape);
  const int channels = Config::kRows * kBlock * (p.shares_weights ? 1 : 2);
  p.channel_tiles = ceil_div(shape.out_channels, channels);
  p.by_channel_tiles = Divisor(p.channel_tiles);
  p.tiles = p.channel_tiles * ceil_div(pixels, Config::kPixels * (p.shares_weights ? 2 : 1));

  constexpr uint32_t kHalfPixels = Config::kPixels / 2, kHalfChannels = Config::kRows * kBlock / 2;
  const auto encode_result = [&](CUtensorMap& map, const void* data) {
    return encode_lines<Element>(map, data, shape.out_channels, pixels, Config::kStored);
  };
  cudaError_t error =
      p.in_order ? encode_lines<Operand>(p.map_input, input, shape.channels, pixels, kHalfPixels)
                 : encode_windows_of_pixels<Operand>(p.map_input, input, shape, kHalfPixels);
  if (error == cudaSuccess) error = encode_result(p.map_output, p.output);
  if (error == cudaSuccess && p.residual != nullptr) {
    error = encode_result(p.map_residual, p.residual);
  }
  if (error == cudaSuccess) {
    error = encode_weight<Operand>(p.map_weight, weight, shape, kHalfChannels);
  }
  if (error != cudaSuccess) return error;

  constexpr int kCluster = 2;
  const int clusters = std::min(p.tiles, std::max(multiprocessors / kCluster, 1));
  return start<UnskippedRoles<Config>>(conv_unskipped_sm90<Config>, p, clusters * kCluster,
                                       kCluster, stream);
}

// Calls the instance of `tile`, one of kTiles.
template <class Element, const auto& kTiles, size_t kNumber = 0>
cudaError_t convolve_unskipped(const UnskippedTile& tile, const UnskippedParams& p,
                               const void* input, const void* weight, int multiprocessors,
                               cudaStream_t stream) {
  if constexpr (kNumber == std::size(kTiles)) {
    return cudaErrorInvalidValue;
  } else {
    constexpr UnskippedTile kTile = kTiles[kNumber];
    if constexpr (kTile.exists(sizeof(Element))) {
      if (tile == kTile) {
        using Chosen = UnskippedConfig<Element, kTile.channels / kBlock, kTile.pixels>;
        return convolve_unskipped<Chosen>(p, input, weight, multiprocessors, stream);
      }
    }
    return convolve_unskipped<Element, kTiles, kNumber + 1>(tile, p, input, weight, multiprocessors,
                                                            stream);
  }
}

}  // namespace spamm::kernels::conv::sm90
