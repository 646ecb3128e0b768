// Hopper's convolutions in special cases: of few input channels, half types; where nothing is
// skipped, half types and TF32. Finds the parameters of few_channels.cuh and unskipped.cuh. The
// kernel of boxes (conv_sm90.cpp) serves layers for which the latter does not pay, and norms.

#include "conv/backend.h"
#include "cuda/conv/arguments_sm90.h"
#include "cuda/conv/launch.h"
#include "cuda/device.h"
#include "cuda/operand.h"
#include "kernels/conv/sm90/few_channels_plan.h"
#include "stage_range.h"
#include "threshold.h"

namespace spamm::cuda {

using at::Tensor;
using namespace kernels::conv::sm90;

bool has_few_channels(const Convolution& conv, const Knob& knob) {
  const spamm::ConvShape& shape = conv.shape;
  const bool masked = !skips_nothing(knob);
  // A held tau decides by pixels, and by blocks of channels that thread blocks do not share.
  const bool can_mask = knob.tau && conv.blocks.edge[1] * conv.blocks.edge[2] == 1 &&
                        (conv.block.m >= 64 || shape.out_channels <= conv.block.m) &&
                        shape.kernel_positions() <= kMostMaskedPositions &&
                        conv.input.numel() > 0 && conv.input.numel() < kMost;
  return shape.in_channels > 0 && shape.in_channels * conv.input.element_size() < kAlignment &&
         is_half(conv.input.scalar_type()) && (!masked || can_mask) && shape.groups == 1 &&
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
                           /*multiprocessors=*/1, masked);
}

namespace {

bool fuses_all(const Convolution&) { return true; }

// ---- Few input channels -------------------------------------------------------------------------

// The entries that are copied at a time. Rows of the input start at multiples of as many.
int entries_together(const Tensor& input) {
  const auto address = reinterpret_cast<uintptr_t>(input.const_data_ptr());
  const int64_t row_bytes = input.size(3) * input.size(1) * input.element_size();
  const auto starts_at_multiples_of = [&](int bytes) {
    return address % bytes == 0 && row_bytes % bytes == 0;
  };
  return starts_at_multiples_of(16) ? 8 : starts_at_multiples_of(4) ? 2 : 1;
}

// Output norms are computed on the way if two thread blocks of a multiprocessor have room for their
// tiles' patches along images: one alone hides nothing, and a norm pass is faster. So it is where
// there are fewer images than a strip has, which leave most of its products empty.
bool computes_norms(const Convolution& conv, const kernels::conv::sm90::ConvShape& shape) {
  if (!conv.wants_output_norms || conv.shape.images < kStripPixels) return false;
  const auto plan = plan_few_channels(shape, /*along_images=*/true, /*multiprocessors=*/1);
  return plan && few_channels_blocks(*plan) == 2;
}

ConvolutionResult run_few_channels(const Convolution& conv, const Knob& knob) {
  const OnDevice device(conv.input);
  Arguments arguments(conv, conv.input.contiguous(at::MemoryFormat::ChannelsLast),
                      conv.weight.contiguous(at::MemoryFormat::ChannelsLast));
  arguments.set_output(conv.output_sizes());
  const ConvParams& all = arguments.params;
  const Tensor& input = arguments.input;
  Tensor norms, pixel_norms, norm_weight;
  const bool masked = !skips_nothing(knob);
  const bool along_images = !masked && computes_norms(conv, all.shape);
  if (along_images) norms = empty_layer_norms(conv);
  FewChannelsParams p = {
      .input = input.const_data_ptr(),
      .weight = arguments.weight.const_data_ptr(),
      .bias = all.bias,
      .residual = all.residual,
      .output = all.output,
      .norms = along_images ? norms.mutable_data_ptr<float>() : nullptr,
      .shape = all.shape,
      .activation = all.activation,
      .slopes = all.slopes,
      .together = entries_together(input),
      .plan = *plan_few_channels(all.shape, along_images, device.multiprocessors(), masked),
  };
  Threshold tau;
  if (masked) {
    pixel_norms = held_pixel_norms(conv, input, knob);
    norm_weight = weight_norms(conv).contiguous();
    tau = Threshold(*knob.tau, at::kFloat);
    p.held = {.pixels = pixel_norms.const_data_ptr<float>(),
              .weights = norm_weight.const_data_ptr<float>(),
              .tau = tau.argument<float>(),
              .log2_images = log2_of(conv.blocks.edge[0]),
              .log2_block_m = log2_of(conv.block.m)};
  }
  const StageRange stage(kMultiplyStage);
  const auto launch = input.scalar_type() == at::kHalf ? launch_few_channels<__half>
                                                       : launch_few_channels<__nv_bfloat16>;
  C10_CUDA_CHECK(launch(p, device.multiprocessors(), device.stream()));
  return {arguments.output, norms};
}

// ---- Where nothing is skipped -------------------------------------------------------------------

int64_t output_pixels(const spamm::ConvShape& shape) {
  return shape.images * shape.output.height * shape.output.width;
}

constexpr int kStepBytes = 128;  // of a pixel's channels

int64_t steps_of(const spamm::ConvShape& shape, int64_t depth) {
  return shape.kernel_positions() * blocks_of(shape.in_channels, depth);
}

// The share of products in the padding, if the kernel of boxes leaves them out. It does where a box
// is one pixel of 64 images and the weight's norms, which tell that it is finite, are given.
double padding_left_out(const Convolution& conv) {
  const spamm::ConvShape& shape = conv.shape;
  if (!conv.norm_weight || shape.images % 64 != 0) return 0;
  return 1 - shape.share_inside();
}

bool unskipped_pays(const Convolution& conv) {
  if (const auto forced = forced_unskipped()) return forced->runs;
  if (forced_tile()) return false;  // a tile of the kernel of boxes
  const spamm::ConvShape& shape = conv.shape;
  return !is_half(conv.input.scalar_type()) ||
         unskipped_conv_pays(shape.out_channels, output_pixels(shape), steps_of(shape, 64),
                             check_device(conv.input.device()).multiProcessorCount,
                             forced_segments(), [&] { return padding_left_out(conv); });
}

bool runs_unskipped(const Convolution& conv, const Knob& knob) {
  const spamm::ConvShape& shape = conv.shape;
  const auto aligned = [&](int64_t channels) {
    return channels * conv.input.element_size() % kAlignment == 0;
  };
  return is_of_hopper_type(conv) && skips_nothing(knob) && !conv.wants_output_norms &&
         aligned(shape.in_channels) && aligned(shape.out_channels) && sizes_fit_hopper(conv) &&
         takes_unskipped(kernel_shape(shape, shape.in_channels)) && unskipped_pays(conv);
}

ConvolutionResult run_unskipped(const Convolution& conv, const Knob&) {
  const StageRange stage(kMultiplyStage);
  const OnDevice device(conv.input);
  Arguments arguments(conv, readable_pixels(conv.input), readable_pixels(conv.weight));
  arguments.set_output(conv.output_sizes());
  const auto forced = forced_unskipped();
  const auto bytes = static_cast<int>(conv.input.element_size());
  const UnskippedChoice choice =
      forced && forced->choice
          ? *forced->choice
          : choose_unskipped_tile(bytes, conv.shape.out_channels, output_pixels(conv.shape),
                                  steps_of(conv.shape, kStepBytes / bytes),
                                  device.multiprocessors());
  UnskippedParams p{};
  static_cast<ConvOperands&>(p) = arguments.params;
  p.shares_weights = choice.shares_weights;
  const auto launch = of_type(conv.input.scalar_type(), launch_unskipped<__half>,
                              launch_unskipped<__nv_bfloat16>, launch_unskipped<float>);
  C10_CUDA_CHECK(launch(p, arguments.input.const_data_ptr(), arguments.weight.const_data_ptr(),
                        choice.tile, device.multiprocessors(), device.stream()));
  return {arguments.output, Tensor()};
}

const Backends<ConvBackend> few_channels(at::kCUDA, Rank::kSpecial,
                                         {.convolve = {&has_few_channels, &run_few_channels},
                                          .fuses_epilogue = &fuses_all});
const Backends<ConvBackend> unskipped(at::kCUDA, Rank::kSpecial,
                                      {.convolve = {&runs_unskipped, &run_unskipped},
                                       .fuses_epilogue = &fuses_all});

}  // namespace
}  // namespace spamm::cuda
