// Channels-last memory as convolution kernels read it.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/constant_pad_nd.h>

#include "operand.h"

namespace spamm::cuda {

// x (images, channels, rows, columns) in channels-last memory whose address and lines of channels
// are multiples of 16 bytes: x itself where it lies so, else a copy, with channels of zeros added.
inline at::Tensor readable_pixels(const at::Tensor& x) {
  const int64_t unit = kAlignment / x.element_size(), rest = x.size(1) % unit;
  const at::Tensor padded = rest ? at::constant_pad_nd(x, {0, 0, 0, 0, 0, unit - rest}) : x;
  const at::Tensor taken = padded.contiguous(at::MemoryFormat::ChannelsLast);
  const bool aligned = reinterpret_cast<uintptr_t>(taken.const_data_ptr()) % kAlignment == 0;
  return aligned ? taken : taken.clone();
}

}  // namespace spamm::cuda
