// A convolution's and a max pooling's sizes in the types of kernels, most of them Hopper's.
#pragma once

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstdint>

#include "block.h"
#include "conv/backend.h"
#include "cuda/device.h"
#include "cuda/operand.h"
#include "kernels/conv/sm90/params.h"

namespace spamm::cuda {

// Offsets, coordinates and numbers of tiles are 32 bits wide. The margin allows steps past the end.
constexpr int64_t kMost = (int64_t{1} << 31) - 1024;

inline bool is_half(at::ScalarType dtype) { return dtype == at::kHalf || dtype == at::kBFloat16; }

template <class Launch>
Launch* of_type(at::ScalarType dtype, Launch* f16, Launch* bf16, Launch* f32) {
  return dtype == at::kHalf ? f16 : dtype == at::kBFloat16 ? bf16 : f32;
}

inline kernels::Size2 size2(const Size2& size) {
  return {static_cast<int>(size.height), static_cast<int>(size.width)};
}

inline kernels::conv::sm90::Extent extent(int64_t images, const Size2& size) {
  return {static_cast<int>(images), static_cast<int>(size.height), static_cast<int>(size.width)};
}

inline kernels::conv::sm90::Log2Block log2_block(const Box& edge) {
  return {log2_of(edge[0]), log2_of(edge[1]), log2_of(edge[2])};
}

// Channels covered by one norm. A block of 32 holds all channels and is padded to 64.
inline int log2_group(const Block& block) { return std::max(log2_of(block.k), 6); }

// pixel_norms_job() for sizes below kMost.
template <class... Rest>
kernels::conv::sm90::PixelNormsJob norms_job(const void* data, int64_t images, int64_t pixels,
                                             int64_t channels, Rest... rest) {
  return kernels::conv::sm90::pixel_norms_job(data, static_cast<int>(images),
                                              static_cast<int>(pixels), static_cast<int>(channels),
                                              rest...);
}

// Tells whether the kernels support a block's m and k: 64 or 128, or 32 if one block holds all
// channels.
inline bool supports_channels(const Block& block, int64_t out_channels, int64_t in_channels) {
  return (block.m >= 64 || out_channels <= block.m) && (block.k >= 64 || in_channels <= block.k);
}

// Tells whether the Hopper kernels run on the input's device and support the convolution's sizes;
// its blocks too; and whether TMA can load them as boxes.
bool sizes_fit_hopper(const Convolution& conv);
bool fits_hopper(const Convolution& conv);
bool fits_boxes(const Convolution& conv);

// `channels`: channels of the input, including its padding.
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

// The answers to heuristics.h where nothing is skipped.
inline UnskippedConv unskipped_size(const Convolution& conv) {
  const spamm::ConvShape& shape = conv.shape;
  return {.images = shape.images,
          .in_channels = shape.in_channels,
          .out_channels = shape.out_channels,
          .positions = shape.kernel_positions(),
          .in_pixels = shape.input.height * shape.input.width,
          .out_pixels = shape.output.height * shape.output.width};
}

// ---- Max pooling by single pixels ---------------------------------------------------------------

// `pixel_chunks`: what threads pool of an output pixel, 16 bytes each; 0 if they are not counted.
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
