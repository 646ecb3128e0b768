// Hopper's convolution of few input channels: turns tensors into kernel parameters.
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>

#include <algorithm>
#include <bit>

#include "conv/backend.h"
#include "cuda/conv/launch_sm90.h"
#include "cuda/conv/sizes_sm90.h"
#include "cuda/device.h"
#include "cuda/hopper.h"
#include "cuda/operand.h"
#include "threshold.h"

namespace spamm::cuda {
namespace {

using at::Tensor;
using namespace kernels::conv::sm90;

bool supports(const Convolution& conv, const Knob& knob) {
  const spamm::ConvShape& shape = conv.shape;
  return !has_packed_windows(shape) && shape.in_channels > 0 &&
         shape.in_channels * conv.input.element_size() < kAlignment &&
         is_half(conv.input.scalar_type()) && skips_nothing(knob) && shape.groups == 1 &&
         shape.out_channels * conv.input.element_size() % kAlignment == 0 &&
         shape.dilation.width == 1 && has_hopper_kernels(check_device(conv.input.device())) &&
         // Kernel sizes and offsets within an image are 32 bits wide.
         std::max({shape.kernel.height, shape.kernel.width, shape.stride.width}) < 256 &&
         std::max({shape.input.height + 2 * shape.padding.height,
                   shape.input.width + 2 * shape.padding.width,
                   shape.dilation.height * shape.kernel.height}) < kMost / 64 &&
         shape.out_channels < (1 << 20) &&
         shape.images * shape.output.height * shape.output.width < kMost &&
         FewChannelsLayout(kernel_shape(shape, shape.in_channels)).entries() *
                 conv.input.element_size() <=
             kFewChannelsSharedBytes;
}

bool fuses_epilogue(const Convolution& conv) { return !conv.residual; }

bool is_aligned(const void* data) { return reinterpret_cast<uintptr_t>(data) % kAlignment == 0; }

// The images of a thread block. Their output norm needs all 64; else as many as fit, so that rows
// make up for missing images.
int log2_images(const Convolution& conv) {
  const int64_t images = conv.wants_output_norms ? kFewChannelsLines : conv.shape.images;
  return std::bit_width(static_cast<uint64_t>(std::min<int64_t>(images, kFewChannelsLines))) - 1;
}

ConvolutionResult run(const Convolution& conv, const Knob&) {
  const OnDevice device(conv.input);
  const spamm::ConvShape& shape = conv.shape;
  const Tensor input = conv.input.contiguous(at::MemoryFormat::ChannelsLast);
  const Tensor weight = conv.weight.contiguous(at::MemoryFormat::ChannelsLast);
  const Tensor output =
      at::empty({shape.images, shape.out_channels, shape.output.height, shape.output.width},
                input.options(), at::MemoryFormat::ChannelsLast);
  Tensor bias, norms;
  if (conv.bias) {
    bias = conv.bias->contiguous();
    if (!is_aligned(bias.const_data_ptr())) bias = bias.clone();
  }
  if (conv.wants_output_norms) {
    norms = at::empty(layer_norms_shape(shape.images, shape.output, shape.out_channels),
                      input.options().dtype(at::kFloat), at::MemoryFormat::Contiguous);
  }
  const FewChannelsParams p = {
      .input = input.const_data_ptr(),
      .weight = weight.const_data_ptr(),
      .bias = conv.bias ? bias.const_data_ptr() : nullptr,
      .output = output.mutable_data_ptr(),
      .norms = conv.wants_output_norms ? norms.mutable_data_ptr<float>() : nullptr,
      .shape = kernel_shape(shape, shape.in_channels),
      .activation = conv.activation,
      .log2_images = log2_images(conv),
      .rows_are_aligned =
          is_aligned(input.const_data_ptr()) &&
          shape.input.width * shape.in_channels * input.element_size() % kAlignment == 0,
  };
  const auto launch = input.scalar_type() == at::kHalf ? launch_few_channels<__half>
                                                       : launch_few_channels<__nv_bfloat16>;
  C10_CUDA_CHECK(launch(p, device.multiprocessors(), device.stream()));
  return {output, norms};
}

const Backends<ConvBackend> registered(at::kCUDA, Rank::kSpecial,
                                       {&supports, &run, nullptr, &fuses_epilogue});

}  // namespace
}  // namespace spamm::cuda
