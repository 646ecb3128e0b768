#include "cuda/conv/boxes_sm90.h"

#include "cuda/conv/sizes_sm90.h"

namespace spamm::cuda {
namespace {

using namespace kernels::conv::sm90;

constexpr int64_t kPixels = 64;  // of a box

// The box of which the fewest cover the output. Among equal ones, that with the most images: where
// a box is one pixel of several images, steps in the padding are not multiplied.
Box best_box(const spamm::ConvShape& shape) {
  const int log2_pixels = log2_of(kPixels);
  const Extent grid = extent(shape.images, shape.output);
  const kernels::Size2 stride = size2(shape.stride);
  Log2Block best = {log2_pixels, 0, 0};
  int64_t fewest = -1;
  for (int images = log2_pixels; images >= 0; --images) {
    for (int rows = 0; rows + images <= log2_pixels; ++rows) {
      const Log2Block box = {images, rows, log2_pixels - images - rows};
      if (!strides_fit(box, stride)) continue;
      const Extent boxes = count(grid, box);  // by shifts
      const int64_t number = int64_t{1} * boxes.images * boxes.rows * boxes.columns;
      if (fewest < 0 || number < fewest) {
        fewest = number;
        best = box;
      }
    }
  }
  return {int64_t{1} << best.images, int64_t{1} << best.rows, int64_t{1} << best.columns};
}

}  // namespace

Convolution in_dense_mode(Convolution conv) {
  spamm::ConvShape& shape = conv.shape;
  // Output norms are those of 64 images, so a box of these computes them on the way.
  const bool keeps_images = conv.wants_output_norms && shape.images >= kLayerNormBlock;
  const bool in_order =
      kernels::conv::sm90::reads_pixels_in_order(kernel_shape(shape, shape.in_channels));
  if (in_order && !keeps_images) {
    const int64_t pixels = shape.images * shape.input.height * shape.input.width;
    shape.images = 1;
    shape.input = shape.output = {1, pixels};
  }
  conv.blocks = {.grid = {shape.images, shape.output.height, shape.output.width},
                 .edge = keeps_images ? Box{kLayerNormBlock, 1, 1} : best_box(shape)};
  conv.block.n = kPixels;
  if (!supports_channels(conv.block, shape.out_channels, shape.in_channels)) {
    conv.block.m = conv.block.k = 64;
    conv.norm_weight.reset();
  }
  return conv;
}

std::optional<Box> box_of_several_pixels(const Convolution& conv) {
  const Box& edge = conv.blocks.edge;
  if (edge[1] * edge[2] > 1 || 2 * conv.shape.images > edge[0]) return std::nullopt;
  const Box box = best_box(conv.shape);
  return box[1] * box[2] > 1 ? std::optional<Box>(box) : std::nullopt;
}

}  // namespace spamm::cuda
