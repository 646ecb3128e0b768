#include "im2col.h"

#include <ATen/Functions.h>

namespace spamm {
namespace {

// The input with its channels last, and with zeros around it wherever whole blocks read: padding,
// images that fill up the last block, rows and columns below blocks that stick out of the grid.
at::Tensor with_margins(const at::Tensor& input, const ConvShape& shape,
                        const PixelBlocks& blocks) {
  const at::Tensor pixels = input.permute({0, 2, 3, 1});
  const Box count = blocks.count();
  const Size2 window = shape.window();
  const auto read = [&](int d, int64_t stride, int64_t window) {
    return (count[d] * blocks.edge[d] - 1) * stride + window;
  };
  const int64_t images = count[0] * blocks.edge[0];
  const int64_t height = std::max(read(1, shape.stride.height, window.height),
                                  shape.input.height + shape.padding.height);
  const int64_t width =
      std::max(read(2, shape.stride.width, window.width), shape.input.width + shape.padding.width);
  if (images == shape.images && height == shape.input.height && width == shape.input.width) {
    return pixels.contiguous();
  }
  const at::Tensor source = at::zeros({images, height, width, shape.in_channels}, input.options());
  source.narrow(0, 0, shape.images)
      .narrow(1, shape.padding.height, shape.input.height)
      .narrow(2, shape.padding.width, shape.input.width)
      .copy_(pixels);
  return source;
}

}  // namespace

std::vector<Piece> cut(const Box& blocks, int64_t most) {
  Box step;  // blocks of a piece: a dimension is cut only where the outer ones go one by one
  for (int d = 2; d >= 0; --d) {
    most = std::max<int64_t>(most, 1);
    step[d] = std::min(most, blocks[d]);
    most /= blocks[d];
  }
  std::vector<Piece> pieces;
  for (int64_t image = 0; image < blocks[0]; image += step[0]) {
    for (int64_t row = 0; row < blocks[1]; row += step[1]) {
      for (int64_t column = 0; column < blocks[2]; column += step[2]) {
        const Box first = {image, row, column};
        Box count;
        for (int d = 0; d < 3; ++d) count[d] = std::min(step[d], blocks[d] - first[d]);
        pieces.push_back({first, count});
      }
    }
  }
  return pieces;
}

Im2col::Im2col(const at::Tensor& input, const ConvShape& shape, const PixelBlocks& blocks,
               int64_t block_k)
    : shape_(shape),
      blocks_(blocks),
      block_k_(block_k),
      source_(with_margins(input, shape, blocks)) {}

at::Tensor Im2col::transposed(const Piece& piece) const {
  const auto& [first, count] = piece;
  const Box& edge = blocks_.edge;
  const int64_t channels = shape_.group_in_channels();
  // Strides of a step of one pixel along the output grid.
  const Box pixel = {source_.stride(0), source_.stride(1) * shape_.stride.height,
                     source_.stride(2) * shape_.stride.width};
  int64_t start = source_.storage_offset();
  for (int d = 0; d < 3; ++d) start += first[d] * edge[d] * pixel[d];
  const at::Tensor windows =
      source_.as_strided({shape_.groups, count[0], count[1], count[2], edge[0], edge[1], edge[2],
                          shape_.kernel.height, shape_.kernel.width, channels},
                         {channels, edge[0] * pixel[0], edge[1] * pixel[1], edge[2] * pixel[2],
                          pixel[0], pixel[1], pixel[2], source_.stride(1) * shape_.dilation.height,
                          source_.stride(2) * shape_.dilation.width, source_.stride(3)},
                         start);

  auto sizes = windows.sizes().vec();
  sizes.back() = blocks_of(channels, block_k_) * block_k_;
  const at::Tensor boxes = sizes.back() == channels ? at::empty(sizes, source_.options())
                                                    : at::zeros(sizes, source_.options());
  boxes.narrow(-1, 0, channels).copy_(windows);
  clear_outside(boxes, piece);
  return boxes.view({shape_.groups, volume(count) * volume(edge),
                     shape_.kernel.height * shape_.kernel.width * sizes.back()});
}

// Zeros the rows and columns that stick out of the grid: the windows there may have read pixels of
// the input. Images beyond the last are zero already.
void Im2col::clear_outside(const at::Tensor& boxes, const Piece& piece) const {
  const Box count = blocks_.count();
  for (int d : {1, 2}) {
    const int64_t inside = blocks_.grid[d] % blocks_.edge[d];
    const bool has_last = piece.first[d] + piece.count[d] == count[d];
    if (inside == 0 || !has_last) continue;
    boxes.narrow(1 + d, piece.count[d] - 1, 1)
        .narrow(4 + d, inside, blocks_.edge[d] - inside)
        .zero_();
  }
}

}  // namespace spamm
