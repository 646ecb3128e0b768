// Layers below the dispatcher, with their arguments checked: for ops that run several.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

#include "conv/backend.h"

namespace spamm {

// The arguments of conv2d, conv2d_with_norms and a chain's convolutions.
struct ConvArguments {
  const Tensor &input, &weight;
  std::optional<Tensor> bias;
  IntArrayRef stride, padding, dilation;
  int64_t groups;
  Knob knob;
  at::OptionalIntArrayRef block, pixel_block;
  std::optional<Tensor> norm_weight, norm_input;
  bool relu, weight_is_ready;
};

// The norms are undefined where they are not wanted.
ConvolutionResult check_and_convolve(const ConvArguments& arguments, bool wants_output_norms);

// The norms are undefined where they are not wanted and would take a pass over the output.
ConvolutionResult check_and_pool(const Tensor& input, IntArrayRef kernel_size, IntArrayRef stride,
                                 IntArrayRef padding, IntArrayRef dilation, bool ceil_mode,
                                 bool wants_output_norms);

}  // namespace spamm
