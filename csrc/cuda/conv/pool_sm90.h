// Hopper's max pooling by single pixels: what the plain one and that of deviations share.
#pragma once

#include <ATen/ops/empty.h>

#include "cuda/conv/sizes_sm90.h"
#include "cuda/device.h"
#include "cuda/operand.h"

namespace spamm::cuda {

// `pixel_chunks`: what threads pool of an output pixel, 16 bytes each.
inline bool pools_by_pixels(const at::Tensor& input, const MaxPool& pool, int64_t pixel_chunks) {
  const at::ScalarType dtype = input.scalar_type();
  return (is_half(dtype) || dtype == at::kFloat) && input.numel() > 0 &&
         input.is_contiguous(at::MemoryFormat::ChannelsLast) &&
         input.size(1) * input.element_size() % kAlignment == 0 &&
         has_hopper_kernels(check_device(input.device())) &&
         // Coordinates and numbers of threads are 32 bits wide.
         input.size(0) < kMost && input.size(1) < kMost &&
         input.size(2) * input.size(3) < kMost / 4 &&
         input.size(0) * pool.output.height * pool.output.width * pixel_chunks < kMost;
}

inline at::Tensor empty_pooled(const at::Tensor& input, const MaxPool& pool) {
  return at::empty({input.size(0), input.size(1), pool.output.height, pool.output.width},
                   input.options(), at::MemoryFormat::ChannelsLast);
}

// `read`: the input, as the kernel reads it.
inline kernels::conv::sm90::PixelPoolParams pixel_pool_params(const at::Tensor& read,
                                                              const at::Tensor& output,
                                                              const MaxPool& pool) {
  return {.input = read.const_data_ptr(),
          .output = output.mutable_data_ptr(),
          .images = static_cast<int>(read.size(0)),
          .channels = static_cast<int>(read.size(1)),
          .in_size = {static_cast<int>(read.size(2)), static_cast<int>(read.size(3))},
          .out_size = size2(pool.output),
          .kernel = size2(pool.kernel),
          .stride = size2(pool.stride),
          .padding = size2(pool.padding),
          .dilation = size2(pool.dilation)};
}

}  // namespace spamm::cuda
