// Convolution without skipping: dense_conv2d, and what conv2d leaves dense. And the end of a
// convolution, by ATen.
#include <ATen/Context.h>
#include <ATen/Functions.h>
#include <torch/library.h>

#include "checks.h"
#include "conv/layers.h"

namespace spamm {
namespace {

void activate_(Tensor output, Activation activation) {
  switch (activation) {
    case Activation::kNone:
      return;
    case Activation::kRelu:
      output.relu_();
      return;
    case Activation::kRelu6:
      at::hardtanh_(output, 0, 6);
      return;
    case Activation::kHardswish:
      at::hardswish_(output);
      return;
    case Activation::kSilu:
      at::silu_(output);
      return;
    case Activation::kLeakyRelu:
      at::leaky_relu_(output, kLeakySlope);
      return;
  }
}

// Whether oneDNN's convolution of float16 ends the process: it can where a window lies in the
// padding alone (seen with torch 2.11 on CPUs that have AVX512-FP16).
bool needs_padded_input(const DenseConvolution& conv) {
  const Size2 window = conv.shape.window(), padding = conv.shape.padding;
  return conv.input.is_cpu() && conv.input.scalar_type() == at::kHalf &&
         (padding.height >= window.height || padding.width >= window.width);
}

// torch's own convolution, under its own settings but for TF32.
Tensor torch_convolution(const DenseConvolution& conv) {
  const at::Context& context = at::globalContext();
  const ConvShape& shape = conv.shape;
  // torch 2.11 leaves a strided output of one column unwritten in part, in bfloat16 on a CPU with
  // AMX. Its first column needs no stride.
  const bool is_column = conv.input.is_cpu() && shape.output.width == 1;
  const Size2 stride = is_column ? Size2{shape.stride.height, 1} : shape.stride;
  Tensor input = conv.input;
  Size2 padding = shape.padding;
  if (needs_padded_input(conv)) {
    input =
        at::constant_pad_nd(input, {padding.width, padding.width, padding.height, padding.height});
    padding = {0, 0};
  }
  const Tensor output =
      at::_convolution(input, conv.weight, conv.bias, stride.pair(), padding.pair(),
                       shape.dilation.pair(), /*transposed=*/false,
                       /*output_padding=*/{0, 0}, shape.groups, context.benchmarkCuDNN(),
                       context.deterministicCuDNN() || context.deterministicAlgorithms(),
                       context.userEnabledCuDNN(), conv.allow_tf32);
  return is_column ? output.narrow(3, 0, 1) : output;
}

Tensor zeros_and_bias(const DenseConvolution& conv) {
  const Tensor output =
      at::zeros(conv.shape.output_sizes(), conv.input.options()).contiguous(conv.output_format);
  if (conv.bias) output.add_(conv.bias->view({-1, 1, 1}));
  return output;
}

Tensor dense_conv2d_op(DenseConvArguments& x) {
  const ConvShape shape = check_convolution(x);
  if (x.residual) check_residual(*x.residual, x.input, shape);
  const bool batched = x.input.dim() == 4;
  const auto as_batch = [&](const Tensor& t) { return batched ? t : t.unsqueeze(0); };
  const Tensor batch = as_batch(x.input);
  const Tensor output =
      dense_convolution({.input = batch,
                         .weight = x.weight,
                         .bias = x.bias,
                         .residual = x.residual ? OptTensor(as_batch(*x.residual)) : OptTensor(),
                         .activation = check_activation(x.activation),
                         .shape = shape,
                         .allow_tf32 = at::globalContext().allowTF32CuDNN(at::Float32Op::CONV),
                         .output_format = conv_output_format(batch, x.weight)});
  return batched ? output : output.squeeze(0);
}

}  // namespace

at::MemoryFormat conv_output_format(const Tensor& input, const Tensor& weight) {
  const bool channels_last = weight.is_mkldnn() ||  // packed; oneDNN writes no other format then
                             input.suggest_memory_format() == at::MemoryFormat::ChannelsLast ||
                             weight.suggest_memory_format() == at::MemoryFormat::ChannelsLast;
  return channels_last ? at::MemoryFormat::ChannelsLast : at::MemoryFormat::Contiguous;
}

void apply_epilogue_(const Tensor& output, const OptTensor& residual, Activation activation) {
  if (residual) output.add_(*residual);
  activate_(output, activation);
}

Tensor dense_convolution(const DenseConvolution& conv) {
  const bool is_empty = conv.shape.images * conv.weight.numel() == 0;
  if (!is_empty) {
    if (const auto output = Backends<DenseBackend>::run(conv.input.device().type(),
                                                        &DenseBackend::convolve, conv)) {
      return output->contiguous(conv.output_format);
    }
  }
  // torch refuses some of the empty ones.
  const Tensor output =
      (is_empty ? zeros_and_bias(conv) : torch_convolution(conv)).contiguous(conv.output_format);
  apply_epilogue_(output, conv.residual, conv.activation);
  return output;
}

Tensor without_skipping(const Convolution& conv) {
  return dense_convolution({.input = conv.input,
                            .weight = conv.weight,
                            .bias = conv.bias,
                            .residual = conv.residual,
                            .activation = conv.activation,
                            .shape = conv.shape,
                            .allow_tf32 = conv.allow_tf32,
                            .output_format = conv.output_format});
}

TORCH_LIBRARY_IMPL(spamm_torch, CompositeExplicitAutograd, m) {
  m.impl("dense_conv2d", boxed<&dense_conv2d_op>());
}

}  // namespace spamm
