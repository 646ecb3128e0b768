// A convolution of deviations of several parts. Some devices have a kernel for it. Otherwise the
// parts are joined before, and phases put in their places behind.
#include "conv/deviation_parts.h"

#include <ATen/Functions.h>
#include <c10/util/accumulate.h>
#include <torch/library.h>

#include "checks.h"
#include "conv/join_deviations.h"
#include "conv/layers.h"
#include "conv/phases.h"
#include "threshold.h"

namespace spamm {
namespace {

DeviationParts checked(at::TensorList parts, at::TensorList norm_parts, bool in_phases) {
  check_parts(parts);
  TORCH_CHECK(norm_parts.empty() || norm_parts.size() == parts.size(),
              "norm_parts must have one tensor for each of the ", parts.size(),
              " parts, or none; got ", norm_parts.size());
  for (size_t i = 0; i < norm_parts.size(); ++i) {
    const Tensor& x = parts[i];
    check_precomputed_norm_map(norm_parts[i],
                               pixel_norms_shape(x.size(0), {x.size(2), x.size(3)}, x.size(1)), x,
                               x.sizes(), "norm_parts");
  }
  return {parts.vec(), norm_parts.vec(), in_phases};
}

// One value in the place of all entries: for what looks at sizes alone.
Tensor shape_of_all(const DeviationParts& given) {
  const Tensor& first = given.parts[0];
  if (given.parts.size() == 1) return first;
  int64_t channels = 0;
  for (const Tensor& part : given.parts) channels += part.size(1);
  return at::empty({1}, first.options())
      .expand({first.size(0), channels, first.size(2), first.size(3)});
}

// pixel_norms() of neighbouring columns together, of channels-last images.
Tensor norms_of_columns(const Tensor& images, int64_t columns) {
  const int64_t count = images.size(0), channels = images.size(1) * columns, rows = images.size(2),
                width = images.size(3) / columns;
  return pixel_norms(images.as_strided({count, channels, rows, width},
                                       {rows * width * channels, 1, width * channels, channels}));
}

ConvolutionResult joined_and_placed(Convolution conv, const Knob& knob,
                                    const DeviationParts& given) {
  if (given.parts.size() > 1) {
    conv.input = at::cat(given.parts, 1);
    conv.norm_input.reset();
  }
  const ConvolutionResult result = convolve(conv, knob);
  if (!given.in_phases) return result;
  const Tensor placed = without_phases(result.output).contiguous(at::MemoryFormat::ChannelsLast);
  return {placed, norms_of_columns(placed, columns_of_norms(placed.size(1)))};
}

std::tuple<Tensor, Tensor> conv2d_deviation_parts(DeviationPartsArguments& x) {
  const DeviationParts given = checked(x.parts, x.norm_parts, x.in_phases);
  const Tensor all = shape_of_all(given);
  x.input = all;
  x.knob = checked_knob(x.knob);
  Convolution conv = check_conv2d(x, /*wants_output_norms=*/true);
  check_base(x.base, all, conv.shape);
  TORCH_CHECK(!x.in_phases || conv.shape.out_channels % 4 == 0,
              "an output in phases must have a multiple of 4 channels; got ",
              conv.shape.out_channels);
  conv.input = given.parts[0];
  if (!given.norms.empty()) conv.norm_input = given.norms[0];
  conv.output_format = at::MemoryFormat::ChannelsLast;
  conv.is_deviation = true;
  if (conv.activation != Activation::kNone) conv.base = x.base;  // else the base cancels
  const bool is_empty = c10::multiply_integers(conv.output_sizes()) == 0;
  const auto* backend =
      is_empty ? nullptr
               : Backends<DeviationPartsBackend>::find(all.device().type(), conv, x.knob, given);
  const ConvolutionResult result =
      backend ? backend->run(conv, x.knob, given) : joined_and_placed(conv, x.knob, given);
  return {result.output, result.norms};
}

}  // namespace

TORCH_LIBRARY_IMPL(spamm_torch, CompositeExplicitAutograd, m) {
  m.impl("conv2d_deviation_parts", boxed<&conv2d_deviation_parts>());
}

}  // namespace spamm
