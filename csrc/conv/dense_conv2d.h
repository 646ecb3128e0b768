// Convolution without skipping: dense_conv2d, and what conv2d leaves dense.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "activation.h"
#include "backends.h"
#include "conv/shape.h"

namespace spamm {

// A convolution whose arguments have been checked: activation(conv + bias + residual).
struct DenseConvolution {
  at::Tensor input, weight;  // a batch, and (out_channels, in_channels / groups, height, width)
  std::optional<at::Tensor> bias, residual;
  Activation activation;
  ConvShape shape;
  bool allow_tf32;  // for float32 on CUDA
  at::MemoryFormat output_format;
  std::optional<at::Tensor> base = std::nullopt;  // as of Convolution, in conv/backend.h
};

// A device's call that computes the epilogue too.
struct DenseConvBackend {
  bool (*supports)(const DenseConvolution&);  // neither the output nor the weight is empty
  at::Tensor (*run)(const DenseConvolution&);
};

// The output, a batch in output_format: by the device's backend, or else by torch's convolution and
// the epilogue after it.
at::Tensor dense_convolution(const DenseConvolution& conv);

// Channels last if the input or the weight is, as in torch's convolutions.
at::MemoryFormat conv_output_format(const at::Tensor& input, const at::Tensor& weight);

}  // namespace spamm
