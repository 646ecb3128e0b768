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

// Whether oneDNN's kernels of half types compute it, of which two answers are wrong in torch 2.11.
bool is_half_on_cpu(const DenseConvolution& conv) {
  return conv.input.is_cpu() && at::isReducedFloatingType(conv.input.scalar_type());
}

// Whether no window reads a pixel, along one axis at least.
bool reads_nothing(const ConvShape& x) {
  const auto misses = [](int64_t outputs, int64_t kernel, int64_t input, int64_t stride,
                         int64_t padding, int64_t dilation) {
    for (int64_t first = -padding; outputs > 0; --outputs, first += stride) {
      for (int64_t k = 0; k < kernel; ++k) {
        const int64_t pixel = first + k * dilation;
        if (pixel >= 0 && pixel < input) return false;
      }
    }
    return true;
  };
  return misses(x.output.height, x.kernel.height, x.input.height, x.stride.height, x.padding.height,
                x.dilation.height) ||
         misses(x.output.width, x.kernel.width, x.input.width, x.stride.width, x.padding.width,
                x.dilation.width);
}

// torch's own convolution, under its own settings but for TF32.
Tensor torch_convolution(const DenseConvolution& conv) {
  const at::Context& context = at::globalContext();
  const ConvShape& shape = conv.shape;
  // A strided output of one column stays unwritten in part, in bfloat16 with AMX. Its first column
  // needs no stride.
  const bool is_column = is_half_on_cpu(conv) && shape.output.width == 1;
  const Size2 stride = is_column ? Size2{shape.stride.height, 1} : shape.stride;
  const Tensor output =
      at::_convolution(conv.input, conv.weight, conv.bias, stride.pair(), shape.padding.pair(),
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
  // torch refuses some of the empty ones. Where half types read nothing on a CPU with AVX-512, it
  // ends the process.
  const bool is_empty = conv.shape.images * conv.weight.numel() == 0 ||
                        (is_half_on_cpu(conv) && reads_nothing(conv.shape));
  if (!is_empty) {
    if (const auto output = Backends<DenseBackend>::run(conv.input.device().type(),
                                                        &DenseBackend::convolve, conv)) {
      return output->contiguous(conv.output_format);
    }
  }
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
