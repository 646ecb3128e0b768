// The parameters of the portable convolution and of the kernel for its norms.
#pragma once

#include "kernels/common/tau.h"
#include "kernels/conv/im2col_matrix.h"
#include "kernels/multiply/params.h"

namespace spamm::kernels {

template <class Norm>
struct Im2colNormsParams {
  Im2colMatrix matrix;
  int log2_block_k;
  Norm* norms;  // (groups, pixel blocks, K / block k), contiguous
};

// Norms of the blocks of the im2col matrix, in one of two forms:
//   per pixel   (groups, image blocks, input rows, input columns, channel blocks). For pixel blocks
//               of one pixel of several images: the norm at a kernel position is a shifted look-up.
//   per block   (groups, pixel blocks, K / block k)
template <class Norm>
struct Im2colNorms {
  const Norm* norms;
  bool per_pixel;
};

template <class Norm>
struct ConvSm80Params {
  Im2colMatrix pixels;
  Operand weight;    // (groups, output channels, K), k-major
  int out_channels;  // of a group
  int log2_block_m, log2_block_k;
  const Norm* norm_weight;  // (groups, blocks of output channels, K / block k), contiguous
  Im2colNorms<Norm> norm_pixels;
  Tau<Norm> tau;
  const void* bias;  // (groups x out_channels); may be null
  bool relu;
  void* output;  // (images, rows, columns, groups x out_channels), contiguous
};

}  // namespace spamm::kernels
