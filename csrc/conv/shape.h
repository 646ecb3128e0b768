// The sizes of a 2-d convolution, from its checked arguments.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <array>
#include <limits>
#include <optional>

#include "arguments.h"
#include "checks.h"

namespace spamm {

struct Size2 {
  int64_t height, width;

  std::array<int64_t, 2> pair() const { return {height, width}; }
};

struct ConvShape {
  int64_t images, in_channels, out_channels, groups;
  Size2 input, kernel, stride, padding, dilation, output;

  int64_t group_in_channels() const { return in_channels / groups; }
  int64_t group_out_channels() const { return out_channels / groups; }
  // Rows and columns of the input that one output pixel depends on.
  Size2 window() const {
    return {(kernel.height - 1) * dilation.height + 1, (kernel.width - 1) * dilation.width + 1};
  }
  std::array<int64_t, 4> output_sizes() const {
    return {images, out_channels, output.height, output.width};
  }
  // The number of kernel positions. They are numbered row by row.
  int64_t kernel_positions() const { return kernel.height * kernel.width; }
  // The share of kernel positions, over all output pixels, that meet the input and not padding.
  double share_inside() const {
    const auto along = [this](int64_t Size2::*d) {
      int64_t inside = 0;
      for (int64_t position = 0; position < kernel.*d; ++position) {
        const int64_t first = position * (dilation.*d) - padding.*d;  // what output 0 reads
        const auto outputs_before = [&](int64_t pixel) {
          const int64_t distance = std::max<int64_t>(pixel - first, 0);
          return std::min((distance + stride.*d - 1) / (stride.*d), output.*d);
        };
        inside += outputs_before(input.*d) - outputs_before(0);
      }
      return static_cast<double>(inside) / static_cast<double>(kernel.*d * (output.*d));
    };
    return along(&Size2::height) * along(&Size2::width);
  }
  // The input pixel that an output pixel reads at a kernel position; nothing if it is padding.
  std::optional<Size2> seen_by(int64_t row, int64_t column, int64_t kernel_position) const {
    const int64_t y =
        row * stride.height - padding.height + kernel_position / kernel.width * dilation.height;
    const int64_t x =
        column * stride.width - padding.width + kernel_position % kernel.width * dilation.width;
    if (y < 0 || y >= input.height || x < 0 || x >= input.width) return std::nullopt;
    return Size2{y, x};
  }
};

// One number for both dimensions, or one for each. Numbers so large that sizes would overflow are
// refused.
inline Size2 check_pair(at::IntArrayRef pair, int64_t least, const char* name) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  TORCH_CHECK((pair.size() == 1 || pair.size() == 2) &&
                  std::min(pair.front(), pair.back()) >= least &&
                  std::max(pair.front(), pair.back()) <= kMost,
              name, " must be one or two integers from ", least, " to ", kMost, "; got ", pair);
  return {pair.front(), pair.back()};
}

// A weight is (out_channels, in_channels / groups, kernel height, kernel width).
inline void check_conv_weight(const at::Tensor& weight, int64_t groups) {
  check_operand_dtype(weight.scalar_type(), "weight");
  TORCH_CHECK(weight.dim() == 4 && weight.size(2) > 0 && weight.size(3) > 0,
              "weight must be (out_channels, in_channels / groups, height, width) with a kernel of "
              "at least 1 x 1; got shape ",
              weight.sizes());
  TORCH_CHECK(groups > 0 && weight.size(0) % groups == 0,
              "groups must be positive and divide weight's out_channels, ", weight.size(0),
              "; got ", groups);
}

inline ConvShape check_convolution(const ConvArguments& x) {
  const Tensor &input = x.input, &weight = x.weight;
  const OptTensor& bias = x.bias;
  const int64_t groups = x.groups;
  check_conv_weight(weight, groups);
  TORCH_CHECK(input.dim() == 3 || input.dim() == 4,
              "input must be (images, channels, height, width) or (channels, height, width); got "
              "shape ",
              input.sizes());
  check_one_dtype(input, weight, "input", "weight");
  check_same_device(input, weight, "input", "weight");
  TORCH_CHECK(input.size(-3) == weight.size(1) * groups, "input must have ",
              weight.size(1) * groups, " channels for a weight of shape ", weight.sizes(),
              " and groups ", groups, "; got shape ", input.sizes());
  if (bias) {
    TORCH_CHECK(bias->dim() == 1 && bias->size(0) == weight.size(0), "bias must have shape [",
                weight.size(0), "] for a weight of shape ", weight.sizes(), "; got shape ",
                bias->sizes());
    check_one_dtype(*bias, weight, "bias", "weight");
    check_same_device(*bias, weight, "bias", "weight");
  }
  ConvShape shape{.images = input.dim() == 4 ? input.size(0) : 1,
                  .in_channels = input.size(-3),
                  .out_channels = weight.size(0),
                  .groups = groups,
                  .input = {input.size(-2), input.size(-1)},
                  .kernel = {weight.size(2), weight.size(3)},
                  .stride = check_pair(x.stride, 1, "stride"),
                  .padding = check_pair(x.padding, 0, "padding"),
                  .dilation = check_pair(x.dilation, 1, "dilation"),
                  .output = {}};
  // Nothing is dilated. Others would change no result, but torch's own CPU convolution crashes.
  if (shape.kernel.height == 1) shape.dilation.height = 1;
  if (shape.kernel.width == 1) shape.dilation.width = 1;
  const Size2 window = shape.window();
  const Size2 padded = {shape.input.height + 2 * shape.padding.height,
                        shape.input.width + 2 * shape.padding.width};
  TORCH_CHECK(window.height <= padded.height && window.width <= padded.width,
              "the dilated kernel, ", window.height, " x ", window.width,
              ", must fit into the padded input; got ", padded.height, " x ", padded.width);
  shape.output = {(padded.height - window.height) / shape.stride.height + 1,
                  (padded.width - window.width) / shape.stride.width + 1};
  return shape;
}

// A residual is added to the output, which has no dimension for images if the input has none.
inline void check_residual(const at::Tensor& residual, const at::Tensor& input,
                           const ConvShape& shape) {
  check_dtype_of(residual, input, "residual", "the input's");
  check_same_device(residual, input, "residual", "input");
  const auto sizes = shape.output_sizes();
  const at::IntArrayRef expected = at::IntArrayRef(sizes).slice(4 - input.dim());
  TORCH_CHECK(residual.sizes() == expected, "residual must have the output's shape ", expected,
              "; got ", residual.sizes());
}

}  // namespace spamm
