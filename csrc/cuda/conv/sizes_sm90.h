// A convolution's sizes, as the Hopper kernels want them.
#pragma once

#include <algorithm>
#include <cstdint>

#include "block.h"
#include "conv/backend.h"
#include "kernels/conv/sm90/params.h"

namespace spamm::cuda {

// Offsets, coordinates and numbers of tiles are 32 bits wide, with some room to step past the end.
constexpr int64_t kMost = (int64_t{1} << 31) - 1024;

inline bool is_half(at::ScalarType dtype) { return dtype == at::kHalf || dtype == at::kBFloat16; }

inline kernels::Size2 size2(const Size2& size) {
  return {static_cast<int>(size.height), static_cast<int>(size.width)};
}

inline kernels::conv::sm90::Extent extent(int64_t images, const Size2& size) {
  return {static_cast<int>(images), static_cast<int>(size.height), static_cast<int>(size.width)};
}

inline kernels::conv::sm90::Log2Block log2_block(const PixelBlocks& blocks) {
  return {log2_of(blocks.edge[0]), log2_of(blocks.edge[1]), log2_of(blocks.edge[2])};
}

// Channels of a channel group: a block of 32 stands alone and is padded to 64.
inline int log2_group(const Block& block) { return std::max(log2_of(block.k), 6); }

// Whether blocks of output and input channels are what the kernels have: 64 or 128, or 32 where one
// block holds all channels.
inline bool takes_channels(const Block& block, int64_t out_channels, int64_t in_channels) {
  return (block.m >= 64 || out_channels <= block.m) && (block.k >= 64 || in_channels <= block.k);
}

// Whether the kernels for Hopper run on the input's device and hold the convolution's sizes.
bool fits_hopper(const Convolution& conv);

// Of an input that has `channels`, those included that it was padded with.
inline kernels::conv::sm90::ConvShape kernel_shape(const spamm::ConvShape& shape,
                                                   int64_t channels) {
  return {.input = extent(shape.images, shape.input),
          .output = extent(shape.images, shape.output),
          .channels = static_cast<int>(channels),
          .out_channels = static_cast<int>(shape.out_channels),
          .kernel = size2(shape.kernel),
          .stride = size2(shape.stride),
          .padding = size2(shape.padding),
          .dilation = size2(shape.dilation)};
}

}  // namespace spamm::cuda
