// Channels-last memory as convolution kernels read it.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/constant_pad_nd.h>

#include "cuda/operand.h"

namespace spamm::cuda {

// x (images, channels, rows, columns) in channels-last memory whose address is a multiple of 16
// bytes and whose number of channels is one of `unit`: x itself where it lies so, else a copy, with
// channels of zeros added.
inline at::Tensor readable_pixels(const at::Tensor& x, int64_t unit) {
  const int64_t rest = x.size(1) % unit;
  const at::Tensor padded = rest ? at::constant_pad_nd(x, {0, 0, 0, 0, 0, unit - rest}) : x;
  const at::Tensor taken = padded.contiguous(at::MemoryFormat::ChannelsLast);
  const bool aligned = reinterpret_cast<uintptr_t>(taken.const_data_ptr()) % kAlignment == 0;
  return aligned ? taken : taken.clone();
}

// The same, with lines of channels in multiples of 16 bytes.
inline at::Tensor readable_pixels(const at::Tensor& x) {
  return readable_pixels(x, kAlignment / x.element_size());
}

}  // namespace spamm::cuda
