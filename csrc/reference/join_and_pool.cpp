// Concatenation and max pooling of deviations, and the end of a convolution of them.
#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <torch/library.h>

#include <limits>

#include "checks.h"
#include "conv/layers.h"
#include "reference/reference.h"

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
  TORCH_CHECK_TYPE(reference.scalar_type() == input.scalar_type(),
                   "reference must have the input's dtype ", dtype_of(input), "; got ",
                   dtype_of(reference));
  const std::array<int64_t, 4> expected = {1, input.size(1), input.size(2), input.size(3)};
  TORCH_CHECK(reference.sizes() == expected, "reference must have the shape of one image, ",
              IntArrayRef(expected), "; got ", reference.sizes());
  if (norm_input) check_norm_input(*norm_input, input);
  if (const auto found = Backend::run(input.device().type(), &ReferenceBackend::pool, input,
                                      reference, norm_input, pool)) {
    return {found->output, found->norms};
  }
  const auto pooled = [&](const Tensor& x) {
    return pool_by_torch(x, kernel_size, stride, padding, dilation, ceil_mode);
  };
  const Tensor of_reference = pooled(reference);
  const Tensor output = pooled(input + reference).sub_(of_reference);
  // A window without a pixel has no deviation.
  output.masked_fill_(of_reference == -std::numeric_limits<double>::infinity(), 0);
  return {output, pixel_norms(output)};
}

}  // namespace

TORCH_LIBRARY_IMPL(spamm_torch, CompositeExplicitAutograd, m) {
  m.impl("join_deviations", &join_deviations);
  m.impl("max_pool2d_deviation", &max_pool2d_deviation);
}

}  // namespace spamm
