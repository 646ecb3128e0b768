// The sizes of a 2-d convolution, from its checked arguments, and the pixel blocks of its output.
#pragma once

#include <ATen/Dispatch.h>
#include <ATen/Functions.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
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
  // The output pixels along a dimension that read a pixel, and not padding, at a position of the
  // kernel: from the first to the last, which is not one of them.
  std::array<int64_t, 2> inside(int64_t Size2::*d, int64_t position) const {
    const int64_t first = position * (dilation.*d) - padding.*d;  // what output 0 reads
    const auto outputs_before = [&](int64_t pixel) {
      return std::min(blocks_of(std::max<int64_t>(pixel - first, 0), stride.*d), output.*d);
    };
    return {outputs_before(0), outputs_before(input.*d)};
  }
  // The share of kernel positions, over all output pixels, that meet the input and not padding.
  double share_inside() const {
    const auto along = [this](int64_t Size2::*d) {
      int64_t sum = 0;
      for (int64_t position = 0; position < kernel.*d; ++position) {
        const auto [first, last] = inside(d, position);
        sum += last - first;
      }
      return static_cast<double>(sum) / static_cast<double>(kernel.*d * (output.*d));
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

// One number for both dimensions, or one for each. Refuses numbers so large that sizes overflow.
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

// ---- Pixel blocks ------------------------------------------------------------------------------

// A count along each dimension of the output grid: images, rows, columns.
using Box = std::array<int64_t, 3>;

inline int64_t volume(const Box& box) { return box[0] * box[1] * box[2]; }

// A block holds one pixel of several images if it can: skipping then depends on the place in the
// picture, which costs the least accuracy.
//
// With a tau, a block holds n images even if the batch is smaller, so that a tau means the same for
// every batch. A searched threshold depends on the batch anyway. A block then holds no more images
// than the batch has, and the rest of n is split evenly, with columns >= rows.
inline Box default_pixel_block(bool has_tau, int64_t images, int64_t n) {
  if (has_tau) return {n, 1, 1};
  const int64_t most = std::clamp<int64_t>(images, 1, n);
  const int64_t together = std::bit_floor(static_cast<uint64_t>(most));
  const int rest = std::countr_zero(static_cast<uint64_t>(n / together));
  return {together, int64_t{1} << (rest / 2), int64_t{1} << (rest - rest / 2)};
}

inline Box check_pixel_block(at::IntArrayRef pixel_block) {
  const auto is_power_of_two = [](int64_t edge) { return edge > 0 && (edge & (edge - 1)) == 0; };
  const bool powers = pixel_block.size() == 3 &&
                      std::all_of(pixel_block.begin(), pixel_block.end(), is_power_of_two);
  // Each edge is checked against the largest n, so that the product cannot overflow.
  const bool fits = powers && *std::max_element(pixel_block.begin(), pixel_block.end()) <= 128;
  TORCH_CHECK_VALUE(
      fits && is_block_edge(pixel_block[0] * pixel_block[1] * pixel_block[2]),
      "pixel_block must be (images, rows, columns), powers of two whose product is 32, 64 or 128; "
      "got ",
      pixel_block);
  return {pixel_block[0], pixel_block[1], pixel_block[2]};
}

// The block of a convolution whose groups have `out_channels` and `in_channels` each. By default,
// small layers get small blocks, lest padding dominate, and n is the pixel block's product.
inline Block conv_block(const std::optional<DimVector>& block,
                        const std::optional<DimVector>& pixel_block, int64_t out_channels,
                        int64_t in_channels) {
  const int64_t n = pixel_block ? volume(check_pixel_block(*pixel_block)) : 64;
  if (!block) return {out_channels <= 32 ? 32 : 64, in_channels <= 32 ? 32 : 64, n};
  const Block edges = check_block(*block);
  TORCH_CHECK_VALUE(!pixel_block || edges.n == n, "pixel_block's product must be the block's n, ",
                    edges.n, "; got pixel_block ", *pixel_block, ", whose product is ", n);
  return edges;
}

// The output grid cut into pixel blocks. They and their pixels have the order (image, row, column).
struct PixelBlocks {
  Box grid;  // pixels
  Box edge;  // pixels of a block

  Box count() const {
    Box blocks;
    for (int d = 0; d < 3; ++d) blocks[d] = blocks_of(grid[d], edge[d]);
    return blocks;
  }
};

// ---- Blocks that stick out of the output grid ---------------------------------------------------

// A pixel block with c of its n pixels inside the grid has the skip norm norm * sqrt(n / c).
// Without this factor, the last images of a batch would be skipped only because they are few.
class PartialBlockScale {
 public:
  // Division and square root round once each in the norms' type. c is exact in it.
  PartialBlockScale(const PixelBlocks& blocks, at::TensorOptions norm_options) {
    const Box count = blocks.count();
    if (volume(count) * volume(blocks.edge) == volume(blocks.grid)) return;  // all are full
    const auto inside = [&](int d) {
      const at::Tensor start =
          at::arange(count[d], norm_options.dtype(at::kLong)).mul(blocks.edge[d]);
      return start.neg().add(blocks.grid[d]).clamp_max(blocks.edge[d]);
    };
    const at::Tensor pixels =
        inside(0).view({-1, 1, 1}).mul(inside(1).view({-1, 1})).mul(inside(2)).flatten();
    const at::Tensor ratios = at::full({}, volume(blocks.edge), norm_options).div(pixels);
    scale_ = ratios.is_cpu() ? square_roots(ratios) : ratios.sqrt();
  }

  // The skip norms of consecutive blocks from number `first` on. Nothing if they equal the norms.
  std::optional<at::Tensor> operator()(const at::Tensor& norms, int64_t first) const {
    if (!scale_) return std::nullopt;
    return norms.mul(scale_->narrow(0, first, norms.size(-1)));
  }

 private:
  // ATen's square root on the CPU is a vector library's, which on some processors rounds wrongly.
  static at::Tensor square_roots(const at::Tensor& x) {
    at::Tensor roots = at::empty_like(x);
    AT_DISPATCH_FLOATING_TYPES(x.scalar_type(), "square_roots", [&] {
      const auto* first = x.const_data_ptr<scalar_t>();
      std::transform(first, first + x.numel(), roots.mutable_data_ptr<scalar_t>(),
                     [](scalar_t value) { return std::sqrt(value); });
    });
    return roots;
  }

  std::optional<at::Tensor> scale_;
};

}  // namespace spamm
