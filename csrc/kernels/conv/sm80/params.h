// The parameters of the portable convolution and of the kernel for its norms.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/common/parameters.h"
#include "kernels/multiply/params.h"

namespace spamm::kernels {

// The transposed im2col matrix of a convolution. It is described by these numbers, never stored.
//
// It has a row for each output pixel, pixel block by pixel block. K runs over (kernel row, kernel
// column, channel), and each kernel position is padded with zeros to whole blocks. Rows of pixels
// outside the output read as zeros.
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
  // The images of a pixel block that exist.
  __host__ __device__ int images_of(int image_block) const {
    const int left = images - (image_block << log2_images), edge = 1 << log2_images;
    return left < edge ? left : edge;
  }
};

// The rows of pixels that exist.
__host__ __device__ inline int packed_rows(const Im2colMatrix& m) {
  return m.images * m.output.rows * m.output.columns;
}

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
// Hopper's kernels have one group.
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
  bool packed;   // rows are those of pixels that exist; norms are per pixel
};

// For blocks that are mostly empty (thin.cuh). To `conv` all groups are one matrix, whose blocks of
// channels are those of all groups; but norms of the weight are by group.
template <class Norm>
struct ThinParams {
  ConvSm80Params<Norm> conv;  // weight: (kernel positions, channels of a group, output channels)
  Norm* norms;                // what the norm pass writes; null elsewhere
  int groups, channels;       // channels: of a group
  int depth_blocks;           // blocks of channels of a group
  int pixels;  // of a pixel block: those before this number may exist, the others do not
};

constexpr int kDepthwiseThreads = 256;
constexpr int kSectorBytes = 32;  // of memory; a thread block has the channels of one

// For groups of one channel, or of few (depthwise.cuh). A thread block computes a tile of output
// pixels, of all images of a block, from the area of the input that their windows cover.
// choose_depthwise() sets all from `sectors` on.
template <class Norm>
struct DepthwiseParams {
  // It has one group. The weight of groups of one channel: (channels, kernel positions); where it
  // has no norms, these are its magnitudes.
  ConvSm80Params<Norm> conv;
  int channels, log2_width;     // of all groups; of one
  int64_t weight_steps[3];      // of several: from output channel, channel and position to the next
  int sectors;                  // of all channels of a pixel
  Size2 tile, area;             // pixels
  int log2_images, log2_slots;  // of images that exist; of threads that share a pixel of them
  int record, bytes;            // of a pixel of the area, norms before entries; of shared memory
  uint32_t blocks;              // thread blocks of the images of a block
  Divisor by_sectors, by_tiles, by_area, by_tile;
};

constexpr int64_t depthwise_norm_bytes(int64_t of_entry) { return of_entry == 2 ? 64 : 32; }
// An odd number of sectors, so that neighbouring pixels lie in different banks. The norm of a
// single channel of a single image is its magnitude. `width`: the channels of a group.
constexpr int64_t depthwise_record(int64_t of_entry, int64_t width, int64_t images) {
  const int64_t entries = images * kSectorBytes;
  return images * width == 1 ? entries : (depthwise_norm_bytes(of_entry) + entries) | kSectorBytes;
}
// Weights and their norms, the area, and what threads may read of images that do not exist.
constexpr int64_t depthwise_bytes(int64_t of_entry, int64_t width, int64_t images, int64_t taps,
                                  int64_t pixels) {
  const int64_t of_tap = width == 1 ? 2 * depthwise_norm_bytes(of_entry) : 32 * 16 + 16;
  return taps * of_tap + images * kSectorBytes + pixels * depthwise_record(of_entry, width, images);
}

}  // namespace spamm::kernels
