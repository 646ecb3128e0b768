// A first layer as a convolution of few, long windows: the parameters of the kernel that packs its
// operands.
#pragma once

#include "kernels/conv/sm90/params.h"

namespace spamm::kernels::conv::sm90 {

constexpr int kPackedChannels = 4;                         // of a pixel, with zeros
constexpr int kPackedPair = 2 * kPackedChannels;           // entries of a pixel in two rows
constexpr int kPackedLine = 64;                            // entries of a window in two rows
constexpr int kPackedColumns = kPackedLine / kPackedPair;  // of the widest kernel

// Operands with at most four channels of a 16-bit type. Two neighbouring rows of the padded input
// become one row of pairs, in which a window of two kernel rows is one line of memory. If the
// number of kernel rows is odd, the last one reads rows of its own, so that nothing but a window's
// entries is ever multiplied. Windows overlap in memory.
struct PackRowsParams {
  ConvShape shape;  // as the caller of the convolution gave it; even strides
  const void *input, *weight;
  // (images, rows, columns, 8 entries): rows 2j and 2j + 1 of the padded input; and (images, rows,
  // columns, 4 entries): row 2j alone, null if the number of kernel rows is even.
  void *pairs, *singles;
  void* packed_weight;  // (out_channels, kernel rows in pairs, 64 entries)

  __host__ __device__ int kernel_pairs() const { return (shape.kernel.rows + 1) / 2; }
  __host__ __device__ int rows() const {
    return (shape.output.rows - 1) * shape.stride.rows / 2 + kernel_pairs();
  }
  // An even number, so that rows of singles start at multiples of 16 bytes.
  __host__ __device__ int columns() const {
    return ((shape.output.columns - 1) * shape.stride.columns + shape.kernel.columns + 1) / 2 * 2;
  }
};

}  // namespace spamm::kernels::conv::sm90
