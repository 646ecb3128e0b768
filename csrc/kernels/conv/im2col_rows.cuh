// Finds the entries of an im2col matrix in the input.
#pragma once

#include "kernels/conv/sm80/params.h"

namespace spamm::kernels {

// The first pixel of a pixel block, in the output.
struct BlockOrigin {
  int image, row, column;

  // A number past the last block gives an origin outside the output.
  __device__ BlockOrigin(const Im2colMatrix& m, int number) {
    int line, image_block, row_block, column_block;
    m.by_block_columns(line, column_block, number);
    m.by_block_rows(image_block, row_block, line);
    image = image_block << m.log2_images;
    row = row_block << m.log2_rows;
    column = column_block << m.log2_columns;
  }
};

// One row of the matrix: an output pixel, and the input pixel at its window's first kernel
// position.
struct alignas(16) Im2colRow {
  int input_pixel;   // index in the input; may lie outside, like row and column
  int row, column;   // in the input
  int output_pixel;  // index in the output, -1 if outside

  __device__ static Im2colRow at(const Im2colMatrix& m, const BlockOrigin& block, int index) {
    const int column = block.column + (index & ((1 << m.log2_columns) - 1));
    const int row = block.row + (index >> m.log2_columns & ((1 << m.log2_rows) - 1));
    const int image = block.image + (index >> (m.log2_columns + m.log2_rows));
    constexpr int kOutside = -(1 << 30);  // no window reaches so far
    if (image >= m.images || row >= m.output.rows || column >= m.output.columns) {
      return {0, kOutside, kOutside, -1};
    }
    const int y = row * m.stride.rows - m.padding.rows;
    const int x = column * m.stride.columns - m.padding.columns;
    return {(image * m.input.rows + y) * m.input.columns + x, y, x,
            (image * m.output.rows + row) * m.output.columns + column};
  }
};

// The distance of a kernel position from the window's first one.
struct WindowStep {
  int rows, columns, pixels;

  __device__ WindowStep(const Im2colMatrix& m, int kernel_position) {
    int kernel_row, kernel_column;
    m.by_kernel_columns(kernel_row, kernel_column, kernel_position);
    rows = kernel_row * m.dilation.rows;
    columns = kernel_column * m.dilation.columns;
    pixels = rows * m.input.columns + columns;
  }

  __device__ bool is_inside(const Im2colMatrix& m, int row, int column) const {
    return static_cast<unsigned>(row + rows) < static_cast<unsigned>(m.input.rows) &&
           static_cast<unsigned>(column + columns) < static_cast<unsigned>(m.input.columns);
  }
};

}  // namespace spamm::kernels
