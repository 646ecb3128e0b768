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
  Activation activation;
  // A thread block has 64 lines: 2^log2_images images of 64 >> log2_images neighbouring output
  // rows. Output norms need 64 images.
  int log2_images;
  // Rows of the input start at multiples of 16 bytes.
  bool rows_are_aligned;
  int tiles = 0;  // set by the launch
};

constexpr int kFewChannelsThreads = 256, kFewChannelsColumns = 8, kFewChannelsLines = 64;
constexpr int kFewChannelsSharedBytes = 112 * 1024;  // at most, for two thread blocks on an SM

// The shared memory of a thread block, in entries: first the weights in the order in which the
// instructions use them, then for each line of the output the input lines that it reads. An input
// line is copied in chunks, so that up to 7 entries lie before the first one that is used.
struct FewChannelsLayout {
  int window;           // entries of a kernel row
  int chunks;           // instructions for a kernel row, 16 entries each
  int line, lines;      // distances between input lines, and between those of two output lines
  int weights, pixels;  // total sizes

  __host__ __device__ explicit FewChannelsLayout(const ConvShape& shape) {
    window = shape.kernel.columns * shape.channels;
    chunks = (window + 15) / 16;
    const int used = (kFewChannelsColumns - 1) * shape.stride.columns * shape.channels + window;
    line = (used + 7 + 7) / 8 * 8;
    // An odd multiple of 8, so that eight output lines lie in different banks.
    lines = (shape.kernel.rows * line + 7) / 16 * 16 + 8;
    weights = shape.kernel.rows * chunks * 16 * 64;
    pixels = kFewChannelsLines * lines;
  }
  __host__ __device__ int entries() const { return weights + pixels; }
};

}  // namespace spamm::kernels::conv::sm90
