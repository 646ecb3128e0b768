// The transposed im2col matrix of a convolution. It is described by these numbers, never stored.
//
// It has a row for each output pixel, pixel block by pixel block. K runs over (kernel row, kernel
// column, channel), and each kernel position is padded with zeros to whole blocks. Rows of pixels
// outside the output read as zeros.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/common/divisor.h"
#include "kernels/common/size2.h"

namespace spamm::kernels {

struct Im2colMatrix {
  const void* data;  // (images, rows, columns, groups x channels), contiguous
  int images, groups;
  int channels;  // of a group; a multiple of 16 bytes, like the address
  Size2 input, output, stride, padding, dilation;
  int kernel_columns, positions;             // positions: kernel positions of the window
  int log2_images, log2_rows, log2_columns;  // edges of a pixel block
  Size2 blocks;                              // pixel blocks along an output image
  int image_blocks;
  int position_depth;  // K of one kernel position, a multiple of 32
  Divisor by_position_depth, by_kernel_columns, by_block_columns, by_block_rows;

  // Must be called after the other members are set.
  void set_divisors() {
    by_position_depth = Divisor(position_depth);
    by_kernel_columns = Divisor(kernel_columns);
    by_block_columns = Divisor(blocks.columns);
    by_block_rows = Divisor(blocks.rows);
  }

  __host__ __device__ int log2_block() const { return log2_images + log2_rows + log2_columns; }
  __host__ __device__ int block_count() const {
    return image_blocks * blocks.rows * blocks.columns;
  }
  __host__ __device__ int64_t depth() const {
    return static_cast<int64_t>(positions) * position_depth;
  }
};

}  // namespace spamm::kernels
