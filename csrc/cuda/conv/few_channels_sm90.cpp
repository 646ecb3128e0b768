// Hopper's convolution of few input channels: turns tensors into kernel parameters.
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>

#include <algorithm>

#include "conv/backend.h"
#include "cuda/conv/sizes_sm90.h"
#include "cuda/device.h"
#include "cuda/operand.h"
#include "kernels/conv/sm90/few_channels_plan.h"
#include "threshold.h"

namespace spamm::cuda {
namespace {

using at::Tensor;
using namespace kernels::conv::sm90;
using kernels::conv::sm90::ConvShape;

// The entries that are copied at a time. Rows of the input start at multiples of as many.
int entries_together(const Tensor& input) {
  const auto address = reinterpret_cast<uintptr_t>(input.const_data_ptr());
  const int64_t row_bytes = input.size(3) * input.size(1) * input.element_size();
  const auto starts_at_multiples_of = [&](int bytes) {
    return address % bytes == 0 && row_bytes % bytes == 0;
  };
  return starts_at_multiples_of(16) ? 8 : starts_at_multiples_of(4) ? 2 : 1;
}

bool supports(const Convolution& conv, const Knob& knob) {
  const spamm::ConvShape& shape = conv.shape;
  return shape.in_channels > 0 && shape.in_channels * conv.input.element_size() < kAlignment &&
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
         plan_few_channels(kernel_shape(shape, shape.in_channels), /*along_images=*/false,
                           /*multiprocessors=*/1);
}

bool fuses_epilogue(const Convolution&) { return true; }

// Output norms are computed on the way if two thread blocks of a multiprocessor have room for their
// tiles' patches along images: one alone hides nothing, and a norm pass is faster. So it is where
// there are fewer images than a strip has, which leave most of its products empty.
bool computes_norms(const Convolution& conv, const ConvShape& shape) {
  if (!conv.wants_output_norms || conv.whole_images < kStripPixels) return false;
  const auto plan = plan_few_channels(shape, /*along_images=*/true, /*multiprocessors=*/1);
  return plan && few_channels_blocks(*plan) == 2;
}

ConvolutionResult run(const Convolution& conv, const Knob&) {
  const OnDevice device(conv.input);
  const spamm::ConvShape& shape = conv.shape;
  const Tensor input = conv.input.contiguous(at::MemoryFormat::ChannelsLast);
  const Tensor weight = conv.weight.contiguous(at::MemoryFormat::ChannelsLast);
  const Tensor output =
      at::empty({shape.images, shape.out_channels, shape.output.height, shape.output.width},
                input.options(), at::MemoryFormat::ChannelsLast);
  Tensor bias, residual, norms;
  if (conv.bias) bias = conv.bias->contiguous();
  if (conv.residual) residual = readable_pixels(*conv.residual);
  const ConvShape sizes = kernel_shape(shape, shape.in_channels);
  const bool along_images = computes_norms(conv, sizes);
  if (along_images) {
    norms = at::empty(layer_norms_shape(shape.images, shape.output, shape.out_channels),
                      input.options().dtype(at::kFloat), at::MemoryFormat::Contiguous);
  }
  const FewChannelsParams p = {
      .input = input.const_data_ptr(),
      .weight = weight.const_data_ptr(),
      .bias = conv.bias ? bias.const_data_ptr() : nullptr,
      .residual = conv.residual ? residual.const_data_ptr() : nullptr,
      .output = output.mutable_data_ptr(),
      .norms = along_images ? norms.mutable_data_ptr<float>() : nullptr,
      .shape = sizes,
      .activation = conv.activation,
      .together = entries_together(input),
      .plan = *plan_few_channels(sizes, along_images, device.multiprocessors()),
  };
  const auto launch = input.scalar_type() == at::kHalf ? launch_few_channels<__half>
                                                       : launch_few_channels<__nv_bfloat16>;
  C10_CUDA_CHECK(launch(p, device.multiprocessors(), device.stream()));
  return {output, norms};
}

const Backends<ConvBackend> registered(at::kCUDA, Rank::kSpecial,
                                       {.convolve = {&supports, &run},
                                        .fuses_epilogue = &fuses_epilogue});

}  // namespace
}  // namespace spamm::cuda
