// Layers without skipping: dense_conv2d, and what conv2d leaves dense; the end of a convolution, by
// ATen; max pooling; and a convolution that skips nothing with max pooling of 2 x 2 pixels behind
// it. Some devices have kernels for them. Otherwise they are torch's.
#include <ATen/Context.h>
#include <ATen/native/Pool.h>
#include <c10/util/accumulate.h>

#include "checks.h"
#include "conv/backend.h"
#include "threshold.h"

namespace spamm {
namespace {

Tensor leaky_relu(Tensor output, const Slope& slope) {
  if (!slope.tensor) {
    return output.requires_grad() ? at::leaky_relu(output, slope.number)
                                  : at::leaky_relu_(output, slope.number);
  }
  const Tensor slopes = slope.tensor->to(output.scalar_type());
  return output.dim() == 4 ? at::prelu(output, slopes)
                           : at::prelu(output.unsqueeze(0), slopes).squeeze(0);
}

// Tells whether oneDNN's kernels of half types compute it; two answers are wrong in torch 2.11.
bool is_half_on_cpu(const DenseConvolution& conv) {
  return conv.input.is_cpu() && at::isReducedFloatingType(conv.input.scalar_type());
}

// torch's own convolution, under its own settings but for TF32.
Tensor torch_convolution(const DenseConvolution& conv) {
  const at::Context& context = at::globalContext();
  const ConvShape& shape = conv.shape;
  // A strided output of one column stays partly unwritten (bfloat16, AMX). One needs no stride.
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

// Channels last if the input or the weight is, as in torch's convolutions.
at::MemoryFormat conv_output_format(const Tensor& input, const Tensor& weight) {
  const bool channels_last = weight.is_mkldnn() ||  // packed; oneDNN writes no other format then
                             input.suggest_memory_format() == at::MemoryFormat::ChannelsLast ||
                             weight.suggest_memory_format() == at::MemoryFormat::ChannelsLast;
  return channels_last ? at::MemoryFormat::ChannelsLast : at::MemoryFormat::Contiguous;
}

Tensor dense_conv2d_op(DenseConvArguments& x) {
  const ConvShape shape = check_convolution(x);
  DenseConvolution conv = dense_arguments(
      x, shape, x.input.is_cuda() && at::globalContext().allowTF32CuDNN(at::Float32Op::CONV));
  conv.output_format = conv_output_format(conv.input, x.weight);  // a picture alone has none
  const Tensor output = dense_convolution(conv);
  return x.input.dim() == 4 ? output : output.squeeze(0);
}

}  // namespace

Tensor apply_epilogue(const Tensor& output, const OptTensor& residual, Activation activation,
                      const Slope& slope) {
  Tensor result = residual ? output.add_(*residual) : output;
  switch (activation) {
    case Activation::kNone:
      break;
    case Activation::kRelu:
      return result.relu_();
    case Activation::kRelu6:
      return at::hardtanh_(result, 0, 6);
    case Activation::kHardswish:
      return at::hardswish_(result);
    case Activation::kSilu:
      return at::silu_(result);
    case Activation::kLeakyRelu:
      return leaky_relu(result, slope);
  }
  return result;
}

Tensor dense_convolution(const DenseConvolution& conv) {
  // torch refuses some empty ones. Half types that read nothing end the process on AVX-512.
  const bool is_empty = conv.shape.images * conv.weight.numel() == 0 ||
                        (is_half_on_cpu(conv) && conv.shape.share_inside() == 0);
  if (!is_empty) {
    if (const auto output = Backends<DenseBackend>::run(conv.input.device().type(),
                                                        &DenseBackend::convolve, conv)) {
      return output->contiguous(conv.output_format);
    }
  }
  const Tensor output =
      (is_empty ? zeros_and_bias(conv) : torch_convolution(conv)).contiguous(conv.output_format);
  return apply_epilogue(output, conv.residual, conv.activation, conv.slope);
}

DenseConvolution dense_arguments(const ConvArguments& x, const ConvShape& shape, bool allow_tf32) {
  if (x.residual) check_residual(*x.residual, x.input, shape);
  const auto as_batch = [&](const Tensor& t) { return x.input.dim() == 4 ? t : t.unsqueeze(0); };
  Slope slope = x.slope;
  if (OptTensor& tensor = slope.tensor) {
    tensor = tensor->to(norm_dtype(x.weight.scalar_type())).contiguous();
  }
  return {.input = as_batch(x.input),
          .weight = x.weight,
          .bias = x.bias,
          .residual = x.residual ? OptTensor(as_batch(*x.residual)) : OptTensor(),
          .activation = check_activation(x),
          .slope = slope,
          .shape = shape,
          .allow_tf32 = allow_tf32,
          .output_format = conv_output_format(x.input, x.weight)};
}

// ---- Max pooling --------------------------------------------------------------------------------

namespace {

// Checks the arguments as torch does, and computes the output's size.
MaxPool check_pool(const Tensor& input, IntArrayRef kernel, IntArrayRef stride, IntArrayRef padding,
                   IntArrayRef dilation, bool ceil_mode) {
  check_operand_dtype(input.scalar_type(), "input");
  TORCH_CHECK(input.dim() == 4, "input must be a batch (N, C, H, W); got shape ", input.sizes());
  MaxPool pool{.kernel = check_pair(kernel, 1, "kernel_size"),
               .stride = check_pair(stride.empty() ? kernel : stride, 1, "stride"),
               .padding = check_pair(padding, 0, "padding"),
               .dilation = check_pair(dilation, 1, "dilation"),
               .output = {},
               .ceil_mode = ceil_mode};
  const auto length = [&](int64_t Size2::*along, int64_t size) {
    return at::native::pooling_output_shape<int64_t>(size, pool.kernel.*along, pool.padding.*along,
                                                     pool.stride.*along, pool.dilation.*along,
                                                     ceil_mode);
  };
  pool.output = {length(&Size2::height, input.size(2)), length(&Size2::width, input.size(3))};
  at::native::pool2d_shape_check(
      input, static_cast<int>(pool.kernel.height), static_cast<int>(pool.kernel.width),
      static_cast<int>(pool.stride.height), static_cast<int>(pool.stride.width),
      static_cast<int>(pool.padding.height), static_cast<int>(pool.padding.width),
      static_cast<int>(pool.dilation.height), static_cast<int>(pool.dilation.width), input.size(1),
      input.size(2), input.size(3), pool.output.height, pool.output.width,
      input.suggest_memory_format());
  return pool;
}

// In the input's memory format.
Tensor max_pool(const Tensor& input, const MaxPool& pool) {
  if (const auto output =
          Backends<DenseBackend>::run(input.device().type(), &DenseBackend::pool, input, pool)) {
    return *output;
  }
  // torch 2.11's kernel for channels-last float64 on CUDA writes beyond its shared memory. Strides
  // of one channel may say both; those of a view of one dimension say contiguous.
  const bool copies = input.is_cuda() && input.scalar_type() == at::kDouble;
  const Tensor output = std::get<0>(at::max_pool2d_with_indices(
      copies ? input.contiguous().view(-1).view(input.sizes()) : input, pool.kernel.pair(),
      pool.stride.pair(), pool.padding.pair(), pool.dilation.pair(), pool.ceil_mode));
  if (!copies) return output;
  return at::empty(output.sizes(), output.options(), input.suggest_memory_format()).copy_(output);
}

Tensor max_pool2d(const Tensor& input, IntArrayRef kernel_size, IntArrayRef stride,
                  IntArrayRef padding, IntArrayRef dilation, bool ceil_mode) {
  return max_pool(input, check_pool(input, kernel_size, stride, padding, dilation, ceil_mode));
}

Tensor conv2d_max_pool_op(ConvPoolArguments& x) {
  const Tensor& input = x.input;
  TORCH_CHECK(input.dim() == 4, "input must be a batch (N, C, H, W); got shape ", input.sizes());
  x.knob = checked_knob({.threshold = 0.0});
  const Convolution conv = check_conv2d(x, /*wants_output_norms=*/false);
  const auto sizes = conv.output_sizes();
  TORCH_CHECK(sizes[2] > 1 && sizes[3] > 1,
              "the convolution's output must have at least 2 x 2 pixels; got ", sizes[2], " x ",
              sizes[3]);
  if (c10::multiply_integers(sizes) > 0) {
    if (const auto output = Backends<DenseBackend>::run(
            input.device().type(), &DenseBackend::convolve_and_pool, conv, x.knob)) {
      return output->contiguous(conv.output_format);
    }
  }
  const Tensor output = convolve(conv, x.knob).output;
  return max_pool(output, check_pool(output, 2, 2, 0, 1, /*ceil_mode=*/false));
}

}  // namespace

TORCH_LIBRARY_IMPL(spamm_torch, CompositeExplicitAutograd, m) {
  m.impl("dense_conv2d", boxed<&dense_conv2d_op>());
  m.impl("max_pool2d", &max_pool2d);
  m.impl("conv2d_max_pool", boxed<&conv2d_max_pool_op>());
}

}  // namespace spamm
