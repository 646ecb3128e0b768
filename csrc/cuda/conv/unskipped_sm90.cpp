// Hopper's convolution of half types where nothing is skipped: turns tensors into the parameters of
// unskipped.cuh. The kernel of boxes (conv_sm90.cpp) serves the layers for which this one does not
// pay, and output norms.
#include <c10/cuda/CUDAException.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "conv/backend.h"
#include "cuda/conv/arguments_sm90.h"
#include "cuda/conv/launch.h"
#include "cuda/conv/sizes_sm90.h"
#include "cuda/device.h"
#include "cuda/forced.h"
#include "cuda/heuristics.h"
#include "cuda/operand.h"
#include "stage_range.h"
#include "threshold.h"

namespace spamm::cuda {
namespace {

using at::Tensor;
using namespace kernels::conv::sm90;

int64_t output_pixels(const spamm::ConvShape& shape) {
  return shape.images * shape.output.height * shape.output.width;
}

int64_t steps_of(const spamm::ConvShape& shape) {
  return shape.kernel_positions() * blocks_of(shape.in_channels, 64);
}

// The share of positions of a kernel of `kernel` that meet the input, over all outputs.
double share_inside(int64_t kernel, int64_t stride, int64_t padding, int64_t dilation,
                    int64_t input, int64_t output) {
  int64_t inside = 0;
  for (int64_t position = 0; position < kernel; ++position) {
    const int64_t first = position * dilation - padding;  // what output 0 reads
    const int64_t below = first < 0 ? std::min(blocks_of(-first, stride), output) : 0;
    const int64_t within = first < input ? std::min(blocks_of(input - first, stride), output) : 0;
    inside += std::max<int64_t>(within - below, 0);
  }
  return static_cast<double>(inside) / static_cast<double>(kernel * output);
}

// The share of products in the padding, if the kernel of boxes leaves them out. It does where a box
// is one pixel of 64 images and the weight's norms, which tell that it is finite, are given.
double padding_left_out(const Convolution& conv) {
  const spamm::ConvShape& shape = conv.shape;
  if (!conv.norm_weight || shape.images % 64 != 0) return 0;
  const auto along = [&](int64_t Size2::*d) {
    return share_inside(shape.kernel.*d, shape.stride.*d, shape.padding.*d, shape.dilation.*d,
                        shape.input.*d, shape.output.*d);
  };
  return 1 - along(&Size2::height) * along(&Size2::width);
}

bool pays(const Convolution& conv) {
  if (const auto forced = forced_unskipped()) return forced->runs;
  if (forced_tile()) return false;  // a tile of the kernel of boxes
  const spamm::ConvShape& shape = conv.shape;
  return unskipped_conv_pays(shape.out_channels, output_pixels(shape), steps_of(shape),
                             check_device(conv.input.device()).multiProcessorCount,
                             forced_segments(), [&] { return padding_left_out(conv); });
}

bool supports(const Convolution& conv, const Knob& knob) {
  const spamm::ConvShape& shape = conv.shape;
  const auto aligned = [&](int64_t channels) {
    return channels * conv.input.element_size() % kAlignment == 0;
  };
  return is_half(conv.input.scalar_type()) && skips_nothing(knob) && !conv.wants_output_norms &&
         aligned(shape.in_channels) && aligned(shape.out_channels) && sizes_fit_hopper(conv) &&
         takes_unskipped(kernel_shape(shape, shape.in_channels)) && pays(conv);
}

bool fuses_epilogue(const Convolution&) { return true; }

ConvolutionResult run(const Convolution& conv, const Knob&) {
  const StageRange stage(kMultiplyStage);
  const OnDevice device(conv.input);
  Arguments arguments(conv, readable_pixels(conv.input), readable_pixels(conv.weight));
  arguments.set_output(conv.output_sizes());
  const auto forced = forced_unskipped();
  const UnskippedChoice choice =
      forced && forced->choice
          ? *forced->choice
          : choose_unskipped_tile(conv.shape.out_channels, output_pixels(conv.shape),
                                  steps_of(conv.shape), device.multiprocessors());
  UnskippedParams p{};
  static_cast<ConvOperands&>(p) = arguments.params;
  p.shares_weights = choice.shares_weights;
  const auto launch = conv.input.scalar_type() == at::kHalf ? launch_unskipped<__half>
                                                            : launch_unskipped<__nv_bfloat16>;
  C10_CUDA_CHECK(launch(p, arguments.input.const_data_ptr(), arguments.weight.const_data_ptr(),
                        choice.tile, device.multiprocessors(), device.stream()));
  return {arguments.output, Tensor()};
}

const Backends<ConvBackend> registered(at::kCUDA, Rank::kSpecial,
                                       {.convolve = {&supports, &run},
                                        .fuses_epilogue = &fuses_epilogue});

}  // namespace
}  // namespace spamm::cuda
