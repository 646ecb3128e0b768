// The pieces of the im2col matrix, copied from a padded channels-last input.
#include "conv/im2col.h"

namespace spamm {
namespace {

// The input as (images, height, width, channels), padded with zeros.
at::Tensor padded(const at::Tensor& input, const ConvShape& shape) {
  const at::Tensor pixels = input.permute({0, 2, 3, 1});
  const auto [rows, columns] = shape.padding;
  if (rows == 0 && columns == 0) return pixels.contiguous();
  const at::Tensor source = at::zeros({shape.images, shape.input.height + 2 * rows,
                                       shape.input.width + 2 * columns, shape.in_channels},
                                      input.options());
  source.narrow(1, rows, shape.input.height).narrow(2, columns, shape.input.width).copy_(pixels);
  return source;
}

}  // namespace

at::Tensor weight_matrix(const Tensor& weight, int64_t groups, int64_t block_k) {
  const int64_t rows = weight.size(0) / groups, channels = weight.size(1);
  const int64_t padding = blocks_of(channels, block_k) * block_k - channels;
  const at::Tensor channels_last = weight.permute({0, 2, 3, 1});
  const at::Tensor padded =
      padding ? at::constant_pad_nd(channels_last, {0, padding}) : channels_last;
  return padded.reshape({groups, rows, weight.size(2) * weight.size(3) * (channels + padding)});
}

std::vector<Piece> cut(const Box& blocks, int64_t most) {
  // The blocks of a piece. A dimension is cut only if a piece has one block along each outer one;
  // otherwise the blocks of a piece would not be consecutive.
  Box step;
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
    : shape_(shape), blocks_(blocks), block_k_(block_k), source_(padded(input, shape)) {}

at::Tensor Im2col::transposed(const Piece& piece) const {
  const auto& [count, edge] = std::tie(piece.count, blocks_.edge);
  const int64_t channels = shape_.group_in_channels();
  const int64_t padded_channels = blocks_of(channels, block_k_) * block_k_;
  const at::Tensor boxes =
      at::empty({shape_.groups, count[0], count[1], count[2], edge[0], edge[1], edge[2],
                 shape_.kernel.height, shape_.kernel.width, padded_channels},
                source_.options());
  if (padded_channels > channels) boxes.narrow(-1, channels, padded_channels - channels).zero_();
  const std::array<std::vector<Part>, 3> inside = {parts(piece, 0, boxes), parts(piece, 1, boxes),
                                                   parts(piece, 2, boxes)};
  for (const Part& images : inside[0])
    for (const Part& rows : inside[1])
      for (const Part& columns : inside[2])
        copy_windows(piece, {images, rows, columns}, boxes.narrow(-1, 0, channels));
  return boxes.view({shape_.groups, volume(count) * volume(edge),
                     shape_.kernel.height * shape_.kernel.width * padded_channels});
}

// Cuts a piece along dimension d into the full blocks and the inner part of a last block that
// sticks out of the grid. Zeroes the part that sticks out.
std::vector<Im2col::Part> Im2col::parts(const Piece& piece, int d, const at::Tensor& boxes) const {
  const int64_t count = piece.count[d], edge = blocks_.edge[d];
  const int64_t inside =
      blocks_.grid[d] - (piece.first[d] + count - 1) * edge;  // of the last block
  if (inside >= edge) return {{0, count, edge}};
  boxes.narrow(1 + d, count - 1, 1).narrow(4 + d, inside, edge - inside).zero_();
  if (count == 1) return {{0, 1, inside}};
  return {{0, count - 1, edge}, {count - 1, 1, inside}};
}

void Im2col::copy_windows(const Piece& piece, const std::array<Part, 3>& part,
                          const at::Tensor& boxes) const {
  // Input strides between neighbouring output pixels.
  const Box pixel = {source_.stride(0), source_.stride(1) * shape_.stride.height,
                     source_.stride(2) * shape_.stride.width};
  auto target = boxes;
  int64_t start = source_.storage_offset();
  for (int d = 0; d < 3; ++d) {
    target = target.narrow(1 + d, part[d].first, part[d].count).narrow(4 + d, 0, part[d].edge);
    start += (piece.first[d] + part[d].first) * blocks_.edge[d] * pixel[d];
  }
  const Box& edge = blocks_.edge;
  target.copy_(source_.as_strided(
      target.sizes(),
      {shape_.group_in_channels(), edge[0] * pixel[0], edge[1] * pixel[1], edge[2] * pixel[2],
       pixel[0], pixel[1], pixel[2], source_.stride(1) * shape_.dilation.height,
       source_.stride(2) * shape_.dilation.width, source_.stride(3)},
      start));
}

}  // namespace spamm
