// The parameters of the convolution of few input channels.
#pragma once

#include "kernels/conv/sm90/params.h"

namespace spamm::kernels::conv::sm90 {

// Contiguous channels-last tensors, dilation 1 along the columns, a multiple of 8 output channels.
// The output starts at a multiple of 16 bytes.
struct FewChannelsParams {
  const void *input, *weight, *bias;  // bias may be null
  void* output;
  float* norms;  // output norms, like ConvParams::norm_output; may be null
  ConvShape shape;
  bool relu;
};

constexpr int kFewChannelsThreads = 256, kFewChannelsColumns = 8, kFewChannelsImages = 64;
constexpr int kFewChannelsSharedBytes = 112 * 1024;  // at most, for two thread blocks on an SM

// The shared memory of a thread block, in entries: first the weights in the order in which the
// instructions use them, then for each image the input lines of one output row.
struct FewChannelsLayout {
  int window;           // entries of a kernel row
  int chunks;           // instructions for a kernel row, 16 entries each
  int line, image;      // distances between lines, and between images
  int weights, pixels;  // total sizes

  __host__ __device__ explicit FewChannelsLayout(const ConvShape& shape) {
    window = shape.kernel.columns * shape.channels;
    chunks = (window + 15) / 16;
    line = (kFewChannelsColumns - 1) * shape.stride.columns * shape.channels + window;
    // An odd multiple of 8, so that eight images lie in different banks.
    image = (shape.kernel.rows * line + 7) / 16 * 16 + 8;
    weights = shape.kernel.rows * chunks * 16 * 64;
    pixels = kFewChannelsImages * image;
  }
  __host__ __device__ int entries() const { return weights + pixels; }
};

}  // namespace spamm::kernels::conv::sm90
