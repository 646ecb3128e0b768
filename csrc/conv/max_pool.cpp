// Max pooling between two convolutions, with output norms for the next layer or without. Some
// devices have kernels for both. Otherwise it is torch's max pooling, followed by a norm pass.
#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <ATen/native/Pool.h>
#include <torch/library.h>

#include <limits>

#include "checks.h"
#include "conv/layers.h"

namespace spamm {
namespace {

Size2 pair_of(IntArrayRef values, const char* name) {
  TORCH_CHECK(values.size() == 1 || values.size() == 2, name,
              " must be an int or a pair (rows, columns); got ", values);
  return {values.front(), values.back()};
}

// Checks the arguments as torch does, and computes the output's size.
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

Tensor max_pool2d(const Tensor& input, IntArrayRef kernel_size, IntArrayRef stride,
                  IntArrayRef padding, IntArrayRef dilation, bool ceil_mode) {
  return check_and_pool(input, kernel_size, stride, padding, dilation, ceil_mode,
                        /*wants_output_norms=*/false)
      .output;
}

std::tuple<Tensor, Tensor> max_pool2d_with_norms(const Tensor& input, IntArrayRef kernel_size,
                                                 IntArrayRef stride, IntArrayRef padding,
                                                 IntArrayRef dilation, bool ceil_mode) {
  auto [output, norms] = check_and_pool(input, kernel_size, stride, padding, dilation, ceil_mode,
                                        /*wants_output_norms=*/true);
  return {output, norms};
}

// Norms of the pixels of an input, or of neighbouring columns together.
void check_norm_input(const Tensor& norms, const Tensor& input) {
  const int64_t width = input.size(3);
  const bool divides = norms.dim() == 4 && norms.size(2) > 0 && width % norms.size(2) == 0;
  const int64_t together = divides ? width / norms.size(2) : 1;
  check_precomputed_norm_map(
      norms,
      pixel_norms_shape(input.size(0), {input.size(2), width / together}, input.size(1) * together),
      input, input.sizes(), "norm_input");
}

std::tuple<Tensor, Tensor> max_pool2d_deviation(const Tensor& input, const Tensor& reference,
                                                IntArrayRef kernel_size, IntArrayRef stride,
                                                IntArrayRef padding, IntArrayRef dilation,
                                                bool ceil_mode,
                                                const std::optional<Tensor>& norm_input) {
  const MaxPool pool = check_pool(input, kernel_size, stride, padding, dilation, ceil_mode);
  check_same_device(reference, input, "reference", "input");
  TORCH_CHECK_TYPE(reference.scalar_type() == input.scalar_type(),
                   "reference must have the input's dtype ", dtype_of(input), "; got ",
                   dtype_of(reference));
  const std::array<int64_t, 4> expected = {1, input.size(1), input.size(2), input.size(3)};
  TORCH_CHECK(reference.sizes() == expected, "reference must have the shape of one image, ",
              IntArrayRef(expected), "; got ", reference.sizes());
  if (norm_input) check_norm_input(*norm_input, input);
  const auto* backend =
      Backends<DeviationPoolBackend>::find(input.device().type(), input, reference, pool);
  if (backend != nullptr) {
    const ConvolutionResult result = backend->run(input, reference, norm_input, pool);
    return {result.output, result.norms};
  }
  const auto pooled = [&](const Tensor& x) {
    return std::get<0>(
        at::max_pool2d_with_indices(x, kernel_size, stride, padding, dilation, ceil_mode));
  };
  const Tensor of_reference = pooled(reference);
  const Tensor output = pooled(input + reference).sub_(of_reference);
  // A window without a pixel has no deviation.
  output.masked_fill_(of_reference == -std::numeric_limits<double>::infinity(), 0);
  return {output, pixel_norms(output)};
}

}  // namespace

ConvolutionResult check_and_pool(const Tensor& input, IntArrayRef kernel_size, IntArrayRef stride,
                                 IntArrayRef padding, IntArrayRef dilation, bool ceil_mode,
                                 bool wants_output_norms) {
  const MaxPool pool = check_pool(input, kernel_size, stride, padding, dilation, ceil_mode);
  const auto* backend =
      Backends<MaxPoolBackend>::find(input.device().type(), input, pool, wants_output_norms);
  if (backend != nullptr) return backend->run(input, pool);
  const Tensor output = std::get<0>(
      at::max_pool2d_with_indices(input, kernel_size, stride, padding, dilation, ceil_mode));
  return {output, wants_output_norms ? layer_norms(output) : Tensor()};
}

TORCH_LIBRARY_IMPL(spamm_torch, CompositeExplicitAutograd, m) {
  m.impl("max_pool2d", &max_pool2d);
  m.impl("max_pool2d_with_norms", &max_pool2d_with_norms);
  m.impl("max_pool2d_deviation", &max_pool2d_deviation);
}

}  // namespace spamm
