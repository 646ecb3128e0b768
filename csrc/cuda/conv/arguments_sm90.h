// A convolution's sizes, as the Hopper kernels take them.
#pragma once

#include <cstdint>

#include "conv/shape.h"
#include "kernels/conv/sm90/params.h"

namespace spamm::cuda {

// Offsets, coordinates and numbers of tiles are 32 bits wide, with some room to step past the end.
constexpr int64_t kMost = (int64_t{1} << 31) - 1024;

inline bool is_half(at::ScalarType dtype) { return dtype == at::kHalf || dtype == at::kBFloat16; }

inline kernels::Size2 step(const Size2& size) {
  return {static_cast<int>(size.height), static_cast<int>(size.width)};
}

inline kernels::conv::Extent extent(int64_t images, const Size2& size) {
  return {static_cast<int>(images), static_cast<int>(size.height), static_cast<int>(size.width)};
}

// Of an input that has `channels`, those included that it was padded with.
inline kernels::conv::ConvShape kernel_shape(const spamm::ConvShape& shape, int64_t channels) {
  return {.input = extent(shape.images, shape.input),
          .output = extent(shape.images, shape.output),
          .channels = static_cast<int>(channels),
          .out_channels = static_cast<int>(shape.out_channels),
          .kernel = step(shape.kernel),
          .stride = step(shape.stride),
          .padding = step(shape.padding),
          .dilation = step(shape.dilation)};
}

}  // namespace spamm::cuda
