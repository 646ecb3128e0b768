// Max pooling between two convolutions, with output norms for the next layer or without, and a
// convolution that skips nothing with max pooling of 2 x 2 pixels behind it. Some devices have
// kernels for them. Otherwise it is torch's max pooling, followed by a norm pass.
#include <ATen/Functions.h>
#include <ATen/native/Pool.h>
#include <c10/util/accumulate.h>
#include <torch/library.h>

#include "checks.h"
#include "conv/layers.h"
#include "threshold.h"

namespace spamm {
namespace {

Size2 pair_of(IntArrayRef values, const char* name) {
  TORCH_CHECK(values.size() == 1 || values.size() == 2, name,
              " must be an int or a pair (rows, columns); got ", values);
  return {values.front(), values.back()};
}

}  // namespace

MaxPool check_pool(const Tensor& input, IntArrayRef kernel, IntArrayRef stride, IntArrayRef padding,
                   IntArrayRef dilation, bool ceil_mode) {
  check_operand_dtype(input.scalar_type(), "input");
  TORCH_CHECK(input.dim() == 4, "input must be a batch (N, C, H, W); got shape ", input.sizes());
  MaxPool pool{.kernel = pair_of(kernel, "kernel_size"),
               .stride = pair_of(stride.empty() ? kernel : stride, "stride"),
               .padding = pair_of(padding, "padding"),
               .dilation = pair_of(dilation, "dilation"),
               .output = {}};
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

Tensor pool_by_torch(const Tensor& input, IntArrayRef kernel_size, IntArrayRef stride,
                     IntArrayRef padding, IntArrayRef dilation, bool ceil_mode) {
  // torch 2.11's kernel for channels-last float64 on CUDA writes beyond its shared memory. Strides
  // of one channel may say both; those of a view of one dimension say contiguous.
  const bool copies = input.is_cuda() && input.scalar_type() == at::kDouble;
  const Tensor output = std::get<0>(
      at::max_pool2d_with_indices(copies ? input.contiguous().view(-1).view(input.sizes()) : input,
                                  kernel_size, stride, padding, dilation, ceil_mode));
  if (!copies) return output;
  return at::empty(output.sizes(), output.options(), input.suggest_memory_format()).copy_(output);
}

namespace {

// The result's norms are undefined unless they are wanted.
ConvolutionResult check_and_pool(const Tensor& input, IntArrayRef kernel_size, IntArrayRef stride,
                                 IntArrayRef padding, IntArrayRef dilation, bool ceil_mode,
                                 bool wants_output_norms) {
  const MaxPool pool = check_pool(input, kernel_size, stride, padding, dilation, ceil_mode);
  if (const auto result = Backends<DenseBackend>::run(input.device().type(), &DenseBackend::pool,
                                                      input, pool, wants_output_norms)) {
    return *result;
  }
  const Tensor output = pool_by_torch(input, kernel_size, stride, padding, dilation, ceil_mode);
  return {output, wants_output_norms ? layer_norms(output) : Tensor()};
}

std::tuple<Tensor, Tensor> max_pool2d(const Tensor& input, IntArrayRef kernel_size,
                                      IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation,
                                      bool ceil_mode, bool norms) {
  const auto result =
      check_and_pool(input, kernel_size, stride, padding, dilation, ceil_mode, norms);
  return {result.output, result.norms};
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
  return check_and_pool(convolve(conv, x.knob).output, /*kernel_size=*/{2, 2}, /*stride=*/{2, 2},
                        /*padding=*/{0, 0}, /*dilation=*/{1, 1}, /*ceil_mode=*/false,
                        /*wants_output_norms=*/false)
      .output;
}

}  // namespace

TORCH_LIBRARY_IMPL(spamm_torch, CompositeExplicitAutograd, m) {
  m.impl("max_pool2d", &max_pool2d);
  m.impl("conv2d_max_pool", boxed<&conv2d_max_pool_op>());
}

}  // namespace spamm
