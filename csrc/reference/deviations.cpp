// The ops of deviations: convolutions of one part or of several along the channels, concatenation,
// max pooling, and the end of a convolution. Where no backend convolves parts, they are joined
// before, and the epilogue and the places of phases follow behind.
#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <c10/util/accumulate.h>

#include "checks.h"
#include "conv/layers.h"
#include "reference/reference.h"
#include "threshold.h"

namespace spamm {

using Backend = Backends<ReferenceBackend>;

void check_parts(at::TensorList parts) {
  TORCH_CHECK(!parts.empty(), "parts must have at least one tensor; got none");
  const Tensor& first = parts[0];
  for (const Tensor& x : parts) {
    check_operand_dtype(x.scalar_type(), "parts");
    check_same_device(x, first, "all parts", "the first one");
    TORCH_CHECK_TYPE(x.scalar_type() == first.scalar_type(), "parts must have one dtype; got ",
                     dtype_of(first), " and ", dtype_of(x));
    TORCH_CHECK(x.dim() == 4, "parts must be batches (N, C, H, W); got shape ", x.sizes());
    TORCH_CHECK(
        x.size(0) == first.size(0) && x.size(2) == first.size(2) && x.size(3) == first.size(3),
        "parts must be pictures of one size, ", first.size(0), " of ", first.size(2), " x ",
        first.size(3), "; got ", x.size(0), " of ", x.size(2), " x ", x.size(3));
  }
}

void apply_deviation_epilogue_(const Tensor& output, const OptTensor& residual, const Tensor& base,
                               Activation activation) {
  const auto done = Backend::run(output.device().type(), &ReferenceBackend::epilogue, output,
                                 residual, base, activation);
  if (done) return;
  if (residual) output.add_(*residual);
  // One for each image: some activations round by where in memory an element lies.
  const Tensor of_reference = at::empty_like(output).copy_(base);
  output.add_(of_reference);
  apply_epilogue_(output, std::nullopt, activation);
  apply_epilogue_(of_reference, std::nullopt, activation);
  output.sub_(of_reference);
}

// Each pixel is a matrix of one row. Empty ones have norms of zero.
Tensor pixel_norms(const Tensor& images) {
  const int64_t count = images.size(0), channels = images.size(1);
  const auto shape = pixel_norms_shape(count, {images.size(2), images.size(3)}, channels);
  const Tensor by_pixel = images.permute({0, 2, 3, 1}).reshape({-1, 1, channels});
  return norm_map(by_pixel, {kLayerNormBlock, kLayerNormBlock}).view(shape);
}

namespace {

std::tuple<Tensor, Tensor> join_deviations(at::TensorList parts) {
  check_parts(parts);
  if (const auto found = Backend::run(parts[0].device().type(), &ReferenceBackend::join, parts)) {
    return {found->output, found->norms};
  }
  const Tensor output = at::cat(parts, 1).contiguous(at::MemoryFormat::ChannelsLast);
  return {output, pixel_norms(output)};
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
                                                bool ceil_mode, const OptTensor& norm_input) {
  const MaxPool pool = check_pool(input, kernel_size, stride, padding, dilation, ceil_mode);
  check_same_device(reference, input, "reference", "input");
  check_dtype_of(reference, input, "reference", "the input's");
  const std::array<int64_t, 4> expected = {1, input.size(1), input.size(2), input.size(3)};
  TORCH_CHECK(reference.sizes() == expected, "reference must have the shape of one image, ",
              IntArrayRef(expected), "; got ", reference.sizes());
  if (norm_input) check_norm_input(*norm_input, input);
  if (const auto found = Backend::run(input.device().type(), &ReferenceBackend::pool, input,
                                      reference, norm_input, pool)) {
    return {found->output, found->norms};
  }
  const Tensor of_reference = pool_by_torch(reference, pool);
  const Tensor output = pool_by_torch(input + reference, pool).sub_(of_reference);
  // A window without a pixel has no deviation.
  output.masked_fill_(of_reference == -std::numeric_limits<double>::infinity(), 0);
  return {output, pixel_norms(output)};
}

// ---- Arguments of a convolution -----------------------------------------------------------------

void check_norms_of_pixels(const Tensor& norms, const Tensor& x) {
  check_precomputed_norm_map(norms, pixel_norms_shape(x.size(0), {x.size(2), x.size(3)}, x.size(1)),
                             x, x.sizes(), "norm_parts");
}

// `x.knob` has been checked, and the norms of the parts are checked by the caller.
Deviation check_deviation(const DeviationArguments& x) {
  Deviation conv = {check_conv2d(x, x.norms)};
  const Tensor &base = x.base, &input = x.input;
  check_same_device(base, input, "base", "input");
  check_dtype_of(base, input, "base", "the input's");
  auto expected = conv.shape.output_sizes();
  expected[0] = 1;
  TORCH_CHECK(base.sizes() == expected, "base must have the shape of one image's output, ",
              IntArrayRef(expected), "; got ", base.sizes());
  TORCH_CHECK(!x.in_phases || conv.shape.out_channels % 4 == 0,
              "an output in phases must have a multiple of 4 channels; got ",
              conv.shape.out_channels);
  if (conv.activation != Activation::kNone) conv.base = base;
  conv.input = x.parts[0];
  conv.parts = x.parts;
  conv.norms = x.norm_parts;
  conv.in_phases = x.in_phases;
  if (!conv.is_whole()) conv.output_format = at::MemoryFormat::ChannelsLast;
  return conv;
}

// One value in the place of all entries: for what looks at sizes alone.
Tensor shape_of_all(at::TensorList parts) {
  const Tensor& first = parts[0];
  if (parts.size() == 1) return first;
  int64_t channels = 0;
  for (const Tensor& part : parts) channels += part.size(1);
  return at::empty({1}, first.options())
      .expand({first.size(0), channels, first.size(2), first.size(3)});
}

// ---- Its results --------------------------------------------------------------------------------

// What a plain convolution computes of it.
Convolution without_base(const Deviation& conv) {
  Convolution plain = conv;
  plain.wants_output_norms = false;
  if (conv.base) {
    plain.residual.reset();
    plain.activation = Activation::kNone;
  }
  return plain;
}

ConvolutionResult with_base(const Tensor& output, const Deviation& conv) {
  if (conv.base) apply_deviation_epilogue_(output, conv.residual, *conv.base, conv.activation);
  return {output, conv.wants_output_norms ? pixel_norms(output) : Tensor()};
}

// Images (N, 4 C, H, W) in phases, [row][column][C], as (N, C, 2 H, 2 W).
Tensor without_phases(const Tensor& x) {
  const int64_t images = x.size(0), channels = x.size(1) / 4, rows = x.size(2), columns = x.size(3);
  return x.reshape({images, 2, 2, channels, rows, columns})
      .permute({0, 3, 4, 1, 5, 2})
      .reshape({images, channels, 2 * rows, 2 * columns});
}

// pixel_norms() of neighbouring columns together, of channels-last images.
Tensor norms_of_columns(const Tensor& images, int64_t columns) {
  const int64_t count = images.size(0), channels = images.size(1) * columns, rows = images.size(2),
                width = images.size(3) / columns;
  return pixel_norms(images.as_strided({count, channels, rows, width},
                                       {rows * width * channels, 1, width * channels, channels}));
}

// is_dense: by dense_conv2d's convolution.
ConvolutionResult convolve_deviation(const Deviation& conv, const Knob& knob, bool is_dense) {
  const bool is_empty = c10::multiply_integers(conv.output_sizes()) == 0;
  if (!is_empty && !is_dense) {
    if (auto found =
            Backend::run(conv.input.device().type(), &ReferenceBackend::convolve, conv, knob)) {
      if (conv.wants_output_norms && !found->norms.defined()) {
        found->norms = pixel_norms(found->output);
      }
      return {found->output.contiguous(conv.output_format), found->norms};
    }
  }
  if (conv.is_whole()) {
    const Convolution plain = without_base(conv);
    return with_base(is_dense ? dense_convolution(plain) : convolve(plain, knob).output, conv);
  }
  Deviation whole = conv;
  whole.in_phases = false;
  if (conv.parts.size() > 1) {
    whole.input = at::cat(conv.parts, 1);
    whole.parts = {whole.input};
    whole.norms.clear();
  }
  if (conv.in_phases) whole.wants_output_norms = false;
  const ConvolutionResult result = convolve_deviation(whole, knob, is_dense);
  if (!conv.in_phases) return result;
  const Tensor placed = without_phases(result.output).contiguous(at::MemoryFormat::ChannelsLast);
  if (!conv.wants_output_norms) return {placed, Tensor()};
  return {placed, norms_of_columns(placed, columns_of_norms(placed.size(1)))};
}

// ---- Its op -------------------------------------------------------------------------------------

// Batches alone: a deviation is one of many images from one reference.
std::tuple<Tensor, Tensor> conv2d_deviation(DeviationArguments& x) {
  check_parts(x.parts);
  TORCH_CHECK(x.norm_parts.empty() || x.norm_parts.size() == x.parts.size(),
              "norm_parts must have one tensor for each of the ", x.parts.size(),
              " parts, or none; got ", x.norm_parts.size());
  for (size_t i = 0; i < x.norm_parts.size(); ++i) {
    check_norms_of_pixels(x.norm_parts[i], x.parts[i]);
  }
  x.input = shape_of_all(x.parts);
  const bool is_dense = !x.knob.threshold && !x.knob.valid_ratio && !x.knob.max_error;
  if (is_dense) x.knob.threshold = 0;
  x.knob = checked_knob(x.knob);
  Deviation conv = check_deviation(x);
  if (is_dense) conv.allow_tf32 = at::globalContext().allowTF32CuDNN(at::Float32Op::CONV);
  const auto [output, norms] = convolve_deviation(conv, x.knob, is_dense);
  return {output, norms};
}

}  // namespace

TORCH_LIBRARY_IMPL(spamm_torch, CompositeExplicitAutograd, m) {
  m.impl("conv2d_deviation", boxed<&conv2d_deviation>());
  m.impl("join_deviations", &join_deviations);
  m.impl("max_pool2d_deviation", &max_pool2d_deviation);
}

}  // namespace spamm
