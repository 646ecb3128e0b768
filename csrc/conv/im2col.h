// The im2col matrix of a convolution, built in pieces.
//
// The matrix is (K, pixels) for each group. K runs over (kernel row, kernel column, channel). The
// channels of each kernel position are padded with zeros to a multiple of the block's k, so that no
// block spans two kernel positions. The columns are the output pixels, pixel block by pixel block.
// Columns outside the output grid are zero.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <vector>

#include "conv/pixel_blocks.h"
#include "conv/shape.h"

namespace spamm {

// Pixel blocks [first, first + count) along each dimension, in units of blocks.
struct Piece {
  Box first, count;
};

// Cuts all pixel blocks into pieces of one to `most` blocks. Each piece is a run of consecutive
// blocks, and the pieces are in block order.
std::vector<Piece> cut(const Box& blocks, int64_t most);

// The weight matrix (groups, out_channels / groups, K), with K in the order of the im2col matrix.
at::Tensor weight_matrix(const at::Tensor& weight, int64_t groups, int64_t block_k);

class Im2col {
 public:
  // `input` is (images, channels, height, width), in any memory format.
  Im2col(const at::Tensor& input, const ConvShape& shape, const PixelBlocks& blocks,
         int64_t block_k);

  // The piece's columns, transposed: (groups, pixels of the piece, K), contiguous.
  at::Tensor transposed(const Piece& piece) const;

 private:
  // Blocks of a piece along one dimension, and the number of pixels copied of each.
  struct Part {
    int64_t first, count, edge;
  };

  std::vector<Part> parts(const Piece& piece, int d, const at::Tensor& boxes) const;
  void copy_windows(const Piece& piece, const std::array<Part, 3>& part,
                    const at::Tensor& boxes) const;

  ConvShape shape_;
  PixelBlocks blocks_;
  int64_t block_k_;
  at::Tensor source_;  // (images, height, width, channels), padded
};

}  // namespace spamm
