// The im2col matrix of a convolution, built in pieces.
//
// The matrix is (K, pixels) for each group. K runs (kernel row, kernel column, channel), each
// kernel position padded with zeros to a multiple of the block's k, so that no block straddles two
// positions. Its columns are the output pixels, pixel block by pixel block; columns of a block that
// stick out of the output grid are zero.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <vector>

#include "conv/pixel_blocks.h"
#include "conv/shape.h"

namespace spamm {

// A box of pixel blocks, in blocks. The boxes that cut() gives are consecutive in block order.
struct Piece {
  Box first, count;
};

// Cuts all pixel blocks into pieces of at most `most` blocks each, at least one. Pieces are in
// block order, and each is a run of consecutive blocks.
std::vector<Piece> cut(const Box& blocks, int64_t most);

// The weight matrix (groups, out_channels / groups, K), K in the im2col matrix's order.
at::Tensor weight_matrix(const at::Tensor& weight, int64_t groups, int64_t block_k);

class Im2col {
 public:
  // `input` is (images, channels, height, width), in any memory format.
  Im2col(const at::Tensor& input, const ConvShape& shape, const PixelBlocks& blocks,
         int64_t block_k);

  // The piece's columns, as the transposed matrix: (groups, pixels of the piece, K), contiguous.
  at::Tensor transposed(const Piece& piece) const;

 private:
  // Blocks of a piece along one dimension, and how many pixels of each.
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
