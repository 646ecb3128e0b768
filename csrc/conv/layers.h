// Layers below the dispatcher, with their arguments checked: for ops that run several.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

#include "conv/backend.h"

namespace spamm {

// Of the arguments that conv2d and conv2d_with_norms share.
ConvolutionResult check_and_convolve(const at::Tensor& input, const at::Tensor& weight,
                                     const std::optional<at::Tensor>& bias, at::IntArrayRef stride,
                                     at::IntArrayRef padding, at::IntArrayRef dilation,
                                     int64_t groups, const std::optional<at::Tensor>& tau,
                                     std::optional<double> valid_ratio,
                                     std::optional<double> max_error, at::OptionalIntArrayRef block,
                                     at::OptionalIntArrayRef pixel_block,
                                     const std::optional<at::Tensor>& norm_weight,
                                     const std::optional<at::Tensor>& norm_input, bool relu,
                                     bool weight_is_ready, bool wants_output_norms);

// The second undefined where it is not asked for and a pass over the output would have to take it.
std::tuple<at::Tensor, at::Tensor> check_and_pool(const at::Tensor& input,
                                                  at::IntArrayRef kernel_size,
                                                  at::IntArrayRef stride, at::IntArrayRef padding,
                                                  at::IntArrayRef dilation, bool ceil_mode,
                                                  bool wants_output_norms);

}  // namespace spamm
