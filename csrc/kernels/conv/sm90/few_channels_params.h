// The parameters of the convolution of few input channels.
#pragma once

#include "kernels/conv/sm90/params.h"

namespace spamm::kernels::conv::sm90 {

// Tensors in channels-last memory, contiguous; dilation 1 along the columns; a multiple of 8 output
// channels, whose memory begins at a multiple of 16 bytes.
struct FewChannelsParams {
  const void *input, *weight, *bias;  // bias may be null
  void* output;
  float* norms;  // of the output for the layer that follows, as ConvParams'; may be null
  ConvShape shape;
  bool relu;
};

constexpr int kFewChannelsThreads = 256, kFewChannelsColumns = 8, kFewChannelsImages = 64;
constexpr int kFewChannelsSharedBytes = 112 * 1024;  // at most: two thread blocks a multiprocessor

// Shared memory of a thread block, in entries: the weights in the order of the instructions, then
// for each image the lines of the input that a row of the output looks at.
struct FewChannelsLayout {
  int window;           // entries of a kernel row
  int chunks;           // of 16 of them
  int line, image;      // entries from one to the next
  int weights, pixels;  // entries

  __host__ __device__ explicit FewChannelsLayout(const ConvShape& shape) {
    window = shape.kernel.columns * shape.channels;
    chunks = (window + 15) / 16;
    line = (kFewChannelsColumns - 1) * shape.stride.columns * shape.channels + window;
    // Images eight entries apart from a multiple of 16: eight of them lie in different banks.
    image = (shape.kernel.rows * line + 7) / 16 * 16 + 8;
    weights = shape.kernel.rows * chunks * 16 * 64;
    pixels = kFewChannelsImages * image;
  }
  __host__ __device__ int entries() const { return weights + pixels; }
};

}  // namespace spamm::kernels::conv::sm90
