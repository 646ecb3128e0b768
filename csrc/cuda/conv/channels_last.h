// Tensors in the channels-last memory that convolution kernels can read.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/constant_pad_nd.h>

#include "cuda/operand.h"

namespace spamm::cuda {

// x (images, channels, rows, columns) in channels-last memory. The address is a multiple of 16
// bytes and the number of channels a multiple of `unit`. Returns x itself if possible, else a copy
// with channels of zeros appended.
inline at::Tensor readable_pixels(const at::Tensor& x, int64_t unit) {
  const int64_t rest = x.size(1) % unit;
  const at::Tensor padded = rest ? at::constant_pad_nd(x, {0, 0, 0, 0, 0, unit - rest}) : x;
  const at::Tensor pixels = padded.contiguous(at::MemoryFormat::ChannelsLast);
  const bool aligned = reinterpret_cast<uintptr_t>(pixels.const_data_ptr()) % kAlignment == 0;
  return aligned ? pixels : pixels.clone();
}

// The same, where the channels of a pixel are a multiple of 16 bytes.
inline at::Tensor readable_pixels(const at::Tensor& x) {
  return readable_pixels(x, kAlignment / x.element_size());
}

}  // namespace spamm::cuda
