// Convolutions of deviations, of one part or of several along the channels. Where no backend has
// them, the parts are joined before, and the epilogue and the places of phases follow behind.
#include <ATen/Context.h>
#include <ATen/Functions.h>
#include <c10/util/accumulate.h>
#include <torch/library.h>

#include <utility>

#include "checks.h"
#include "conv/layers.h"
#include "reference/reference.h"
#include "threshold.h"

namespace spamm {
namespace {

// ---- Arguments ----------------------------------------------------------------------------------

void check_norms_of_pixels(const Tensor& norms, const Tensor& x, const char* name) {
  check_precomputed_norm_map(norms, pixel_norms_shape(x.size(0), {x.size(2), x.size(3)}, x.size(1)),
                             x, x.sizes(), name);
}

// `x.knob` has been checked, and the norms of the input are checked by the caller.
Deviation check_deviation(const DeviationArguments& x, bool wants_output_norms) {
  Deviation conv = {check_conv2d(x, wants_output_norms)};
  const Tensor &base = x.base, &input = x.input;
  check_same_device(base, input, "base", "input");
  TORCH_CHECK_TYPE(base.scalar_type() == input.scalar_type(), "base must have the input's dtype ",
                   dtype_of(input), "; got ", dtype_of(base));
  auto expected = conv.shape.output_sizes();
  expected[0] = 1;
  TORCH_CHECK(base.sizes() == expected, "base must have the shape of one image's output, ",
              IntArrayRef(expected), "; got ", base.sizes());
  if (conv.activation != Activation::kNone) conv.base = base;
  conv.parts = {input};
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

// ---- Results ------------------------------------------------------------------------------------

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

ConvolutionResult convolve_deviation(const Deviation& conv, const Knob& knob) {
  const bool is_empty = c10::multiply_integers(conv.output_sizes()) == 0;
  if (!is_empty) {
    if (auto found = Backends<ReferenceBackend>::run(conv.input.device().type(),
                                                     &ReferenceBackend::convolve, conv, knob)) {
      if (conv.wants_output_norms && !found->norms.defined()) {
        found->norms = pixel_norms(found->output);
      }
      return {found->output.contiguous(conv.output_format), found->norms};
    }
  }
  if (conv.is_whole()) return with_base(convolve(without_base(conv), knob).output, conv);
  Deviation whole = conv;
  whole.in_phases = false;
  if (conv.parts.size() > 1) {
    whole.input = at::cat(conv.parts, 1);
    whole.parts = {whole.input};
    whole.norms.clear();
  }
  const ConvolutionResult result = convolve_deviation(whole, knob);
  if (!conv.in_phases) return result;
  const Tensor placed = without_phases(result.output).contiguous(at::MemoryFormat::ChannelsLast);
  return {placed, norms_of_columns(placed, columns_of_norms(placed.size(1)))};
}

// ---- Ops ----------------------------------------------------------------------------------------

// Batches alone: a deviation is one of many images from one reference.
ConvolutionResult check_and_convolve(DeviationArguments& x, bool wants_output_norms) {
  TORCH_CHECK(x.input.dim() == 4, "input must be (images, channels, height, width); got shape ",
              x.input.sizes());
  const bool is_dense = !x.knob.threshold && !x.knob.valid_ratio && !x.knob.max_error;
  if (is_dense) x.knob.threshold = 0;
  x.knob = checked_knob(x.knob);
  const OptTensor norm_input = std::exchange(x.norm_input, std::nullopt);
  Deviation conv = check_deviation(x, wants_output_norms);
  if (norm_input) {
    check_norms_of_pixels(*norm_input, x.input, "norm_input");
    conv.norms = {*norm_input};
  }
  if (!is_dense) return convolve_deviation(conv, x.knob);
  conv.allow_tf32 = at::globalContext().allowTF32CuDNN(at::Float32Op::CONV);
  return with_base(without_skipping(without_base(conv)), conv);
}

Tensor conv2d_deviation(DeviationArguments& x) {
  return check_and_convolve(x, /*wants_output_norms=*/false).output;
}

std::tuple<Tensor, Tensor> conv2d_deviation_with_norms(DeviationArguments& x) {
  const auto [output, norms] = check_and_convolve(x, /*wants_output_norms=*/true);
  return {output, norms};
}

std::tuple<Tensor, Tensor> conv2d_deviation_parts(DeviationPartsArguments& x) {
  check_parts(x.parts);
  TORCH_CHECK(x.norm_parts.empty() || x.norm_parts.size() == x.parts.size(),
              "norm_parts must have one tensor for each of the ", x.parts.size(),
              " parts, or none; got ", x.norm_parts.size());
  for (size_t i = 0; i < x.norm_parts.size(); ++i) {
    check_norms_of_pixels(x.norm_parts[i], x.parts[i], "norm_parts");
  }
  x.input = shape_of_all(x.parts);
  x.knob = checked_knob(x.knob);
  Deviation conv = check_deviation(x, /*wants_output_norms=*/true);
  TORCH_CHECK(!x.in_phases || conv.shape.out_channels % 4 == 0,
              "an output in phases must have a multiple of 4 channels; got ",
              conv.shape.out_channels);
  conv.input = x.parts[0];
  conv.parts = x.parts;
  conv.norms = x.norm_parts;
  conv.in_phases = x.in_phases;
  conv.output_format = at::MemoryFormat::ChannelsLast;
  const auto [output, norms] = convolve_deviation(conv, x.knob);
  return {output, norms};
}

}  // namespace

TORCH_LIBRARY_IMPL(spamm_torch, CompositeExplicitAutograd, m) {
  m.impl("conv2d_deviation", boxed<&conv2d_deviation>());
  m.impl("conv2d_deviation_with_norms", boxed<&conv2d_deviation_with_norms>());
  m.impl("conv2d_deviation_parts", boxed<&conv2d_deviation_parts>());
}

}  // namespace spamm
