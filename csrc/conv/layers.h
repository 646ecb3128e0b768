// One layer as a plain function, for ops that are made of several. Arguments have been checked, but
// for those of check_conv2d and check_pool.
#pragma once

#include <ATen/core/Tensor.h>

#include "arguments.h"
#include "conv/backend.h"

namespace spamm {

// `x.knob` has been checked.
Convolution check_conv2d(const ConvArguments& x, bool wants_output_norms);

// The output is a batch, in conv.output_format. The result's norms are undefined unless
// conv.wants_output_norms.
ConvolutionResult convolve(const Convolution& conv, const Knob& knob);

// The output, a batch in output_format: by the device's backend, or else by torch's convolution and
// the epilogue after it.
Tensor dense_convolution(const DenseConvolution& conv);

// The arguments that a layer has without skipping, as a batch.
DenseConvolution dense_arguments(const ConvArguments& x, const ConvShape& shape, bool allow_tf32);

// The end of a convolution, for backends that do not compute all of it: adds the residual, if there
// is one, and applies the activation, in place. Each step rounds to the output's type. ReLU keeps
// NaN, as torch's does.
void apply_epilogue_(const Tensor& output, const OptTensor& residual, Activation activation);

// Channels last if the input or the weight is, as in torch's convolutions.
at::MemoryFormat conv_output_format(const Tensor& input, const Tensor& weight);

// Checks the arguments as torch does, and computes the output's size.
MaxPool check_pool(const Tensor& input, IntArrayRef kernel, IntArrayRef stride, IntArrayRef padding,
                   IntArrayRef dilation, bool ceil_mode);

}  // namespace spamm
