// One layer as a plain function that checks its arguments. Ops that run several layers call these
// functions and so pay for the dispatcher once.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

#include "arguments.h"
#include "conv/backend.h"

namespace spamm {

// `x.knob` has been checked. whole_images: if the input is a part of a batch, the images of the
// batch. They also choose the default pixel block.
Convolution check_conv2d(const ConvArguments& x, bool wants_output_norms,
                         std::optional<int64_t> whole_images = std::nullopt);

// The base of deviations must be one image of the convolution's output.
void check_base(const Tensor& base, const Tensor& input, const ConvShape& shape);

// The norm maps with which convolve() would search a threshold. The output must not be empty.
ConvNormMaps norm_maps_of(const Convolution& conv, const Knob& knob);

// The output is a batch, in conv.output_format. The result's norms are undefined unless
// conv.wants_output_norms. `knob` has been checked.
ConvolutionResult convolve(const Convolution& conv, const Knob& knob);

// Without `wants_output_norms`, the result's norms are undefined if they would need a norm pass.
ConvolutionResult check_and_pool(const Tensor& input, IntArrayRef kernel_size, IntArrayRef stride,
                                 IntArrayRef padding, IntArrayRef dilation, bool ceil_mode,
                                 bool wants_output_norms);

// conv2d with `devices`. Composed of differentiable ops, so it has their gradients.
Tensor conv2d_on_devices(const ConvArguments& x);

}  // namespace spamm
