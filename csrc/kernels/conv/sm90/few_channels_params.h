// The parameters of the convolution of few input channels, and how it cuts its work.
#pragma once

#include <cstdint>

#include "kernels/common/divisor.h"
#include "kernels/conv/sm90/params.h"

namespace spamm::kernels::conv::sm90 {

constexpr int kFewChannelsThreads = 256, kFewChannelsWarpgroups = 2;
constexpr int kFewChannelsSharedBytes = 225 * 1024;    // of a multiprocessor
constexpr int kStripPixels = 16;                       // rows of a warp's products
constexpr int kStripsOfProduct = 4;                    // a warpgroup's: one for each of its warps
constexpr int kImageTileColumns = 8, kImageTile = 64;  // of a tile along images

// K runs along a window: kernel row, kernel column, channel. Its entries are read in words of two,
// so a kernel row begins at an even entry of memory and has an even number of entries, in which
// those before and behind the window count as zero. A step is 16 entries.
struct FewChannelsWindow {
  int entries;   // of a kernel row
  int parities;  // 2 if the windows of neighbouring columns begin at even and odd entries in turn
  int first;     // the parity of column 0
  int pairs;     // of entries of a kernel row, with zeros

  __host__ __device__ int lead(int parity) const { return first ^ parity; }  // zeros in front
};

// A strip is 16 pixels whose windows are the rows of a warp's products: neighbouring columns of the
// same parity, or images of one pixel. A tile is some output rows of neighbouring strips, or 64
// images of 8 columns of a row. Its patch is the input that it reads, in shared memory.
struct FewChannelsPlan {
  FewChannelsWindow window;
  bool along_images;
  int steps, passes;         // steps whose operands are in registers at a time, and how often
  int rows, strips;          // of a tile; along images one each
  int columns, images;       // of a tile
  int patch_rows, row_step;  // and input rows from one of them to the next
  int output_step;           // patch rows between output rows
  int kernel_step;           // and between kernel rows
  int line, image;           // distances between rows and between images, in entries
  int log2_row_threads;      // that copy a row

  __host__ __device__ int all_steps() const { return steps * passes; }
  __host__ __device__ int weight_blocks() const { return (all_steps() + 3) / 4; }  // of a parity
  __host__ __device__ int patch() const { return images * image; }
};

// Contiguous channels-last tensors, dilation 1 along the columns, a multiple of 8 output channels.
// Output and residual start at multiples of 16 bytes.
struct FewChannelsParams {
  const void *input, *weight, *bias, *residual;  // bias and residual may be null
  void* output;
  float* norms;  // output norms, like ConvParams::norm_output; may be null. They need along_images
  ConvShape shape;
  Activation activation;
  int together;  // entries of the input that are copied at a time: 8, 2 or 1
  FewChannelsPlan plan;
  // Set by the launch.
  int tiles = 0;
  Divisor by_column_tiles{}, by_row_tiles{}, by_strips{}, by_patch_rows{};
};
template <class Element>
cudaError_t launch_few_channels(FewChannelsParams params, int multiprocessors, cudaStream_t stream);

}  // namespace spamm::kernels::conv::sm90
