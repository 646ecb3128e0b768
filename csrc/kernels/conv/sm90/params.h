// The parameters of the Hopper convolution and of the kernels for its norms, and their launches.
// launch.cuh says which of the parameters its caller sets. A launch runs on the current stream and
// may start before the kernel ahead of it has ended (kernels/common/overlap.cuh). Its result is the
// error code of the driver or the launch.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <bit>
#include <cstdint>

#include "activation.h"
#include "kernels/common/parameters.h"
#include "kernels/conv/sm80/params.h"
#include "kernels/norm_map/params.h"

namespace spamm::kernels::conv::sm90 {

inline int ceil_div(int x, int y) { return (x - 1) / y + 1; }

struct Extent {
  int images, rows, columns;
};

// A convolution of contiguous channels-last tensors: input (images, rows, columns, channels),
// weight (out_channels, kernel rows, kernel columns, channels), output like the input. Addresses
// and channel counts are multiples of 16 bytes.
struct ConvShape {
  Extent input, output;  // with the same number of images
  int channels, out_channels;
  Size2 kernel, stride, padding, dilation;
};

// The logarithms of the edges of a pixel block.
struct Log2Block {
  int images, rows, columns;

  __host__ __device__ int volume() const { return images + rows + columns; }
};

// Norms of contiguous channels-last images, whose channels are a multiple of 16 bytes. A thread
// reads one chunk of channels of several images of a block.
struct PixelNormsJob {
  const void* data;
  int images, pixels, channels;
  int log2_images;  // of a block of images, at most 7
  int log2_group;   // of a group of channels: 6 or 7
  float* norms;     // (blocks of images, pixels, groups of channels)
  // Set by norms_job().
  int log2_held = -1;
  int groups = 0, line_blocks = 0, thread_blocks = 0;
  Divisor by_groups{}, by_line_blocks{};
};

// The way threads share a norm. 2^log2_lanes neighbouring ones have the channels. Beside these,
// 2^kLog2Slices slices have the images of a block in turn. Where a block has no more images than
// that, all but a few of the slices would be idle in a small batch, so there one thread holds all
// images, up to 2^log2_held of them (-1: slices), and adds them up in the order of the slices: the
// bits are the same. It takes several norms in turn, so that enough loads are in flight.
constexpr int kLog2Slices = 3;
constexpr int log2_turns(int log2_held) { return log2_held < 2 ? 2 - log2_held : 0; }

// Norms of a thread block.
__host__ __device__ constexpr int log2_norms(int log2_held, int log2_lanes) {
  return kLog2NormThreads - log2_lanes + (log2_held < 0 ? -kLog2Slices : log2_turns(log2_held));
}

inline int log2_held(int images, int log2_images) {
  const int most = images >> log2_images > 0 ? 1 << log2_images : images;
  if (most > 1 << kLog2Slices) return -1;
  return static_cast<int>(std::bit_width(static_cast<unsigned>(most - 1)));
}

// `sliced`: in slices, however few images there are. Sizes are below 2^31.
inline PixelNormsJob norms_job(const void* data, int64_t images, int64_t pixels, int64_t channels,
                               int log2_images, int log2_group, float* norms, int entry_bytes = 2,
                               bool sliced = false) {
  PixelNormsJob job{data,
                    static_cast<int>(images),
                    static_cast<int>(pixels),
                    static_cast<int>(channels),
                    log2_images,
                    log2_group,
                    norms};
  if (!sliced) job.log2_held = log2_held(job.images, log2_images);
  job.groups = ((job.channels - 1) >> log2_group) + 1;
  const int log2_of_block = log2_norms(job.log2_held, log2_group - (entry_bytes == 4 ? 2 : 3));
  job.line_blocks = ((job.pixels * job.groups - 1) >> log2_of_block) + 1;
  job.thread_blocks = job.line_blocks * (((job.images - 1) >> log2_images) + 1);
  job.by_groups = Divisor(job.groups);
  job.by_line_blocks = Divisor(job.line_blocks);
  return job;
}

struct PixelNormsParams {
  PixelNormsJob jobs[2];  // for the input and, in slices, for the weight; empty if not wanted
  int* zeroed;            // the kernel sets it to 0; may be null
};
template <class Element>
cudaError_t launch_pixel_norms(PixelNormsParams params, cudaStream_t stream);

// Max pooling of channels-last images, whose channels are a multiple of 16 bytes.
struct PixelPoolParams {
  const void* input;
  void* output;
  int images, channels;
  Size2 in_size, out_size, kernel, stride, padding, dilation;
};
template <class Element>
cudaError_t launch_pixel_pool(PixelPoolParams params, cudaStream_t stream);

// The kernel that computes norms of im2col blocks from norms of pixels.
struct BlockNormsParams {
  const float* pixel_norms;
  ConvShape shape;
  Log2Block block;
  Extent blocks;
  int groups;
  float* norms;  // (pixel blocks, kernel positions x groups)
  int* zeroed;   // the kernel sets it to 0; may be null
};
cudaError_t launch_block_norms(const BlockNormsParams& params, cudaStream_t stream);

// Sets a tile counter to zero.
cudaError_t launch_clear_counter(int* counter, cudaStream_t stream);

// A box of a pixel block: half of a block of 128 pixels, or a whole block of 64.
inline Log2Block box_of(Log2Block block) {
  if (block.volume() == 6) return block;
  int& dimension_to_halve = block.images > 0 ? block.images
                            : block.rows > 0 ? block.rows
                                             : block.columns;
  --dimension_to_halve;
  return block;
}

inline Extent count(const Extent& grid, const Log2Block& block) {
  const auto along = [](int size, int log2) { return ((size - 1) >> log2) + 1; };
  return {along(grid.images, block.images), along(grid.rows, block.rows),
          along(grid.columns, block.columns)};
}

// Tells whether TMA can load a box with this stride: it allows at most 256 input pixels along each
// dimension, and element strides of at most 8.
inline bool strides_fit(const Log2Block& block, Size2 stride) {
  const Log2Block box = box_of(block);
  const auto fits = [](int log2, int step) {
    return log2 == 0 || (step <= 8 && ((1 << log2) - 1) * step + 1 <= 256);
  };
  return fits(box.columns, stride.columns) && fits(box.rows, stride.rows);
}

// Tells whether the kernel of boxes of several pixels can compute the pixels' norms: a box holds
// all of the batch's images, and the threads that share a pixel are in one warp.
inline bool takes_norms_of_pixels(const Log2Block& box, int64_t images) {
  return int64_t{1} << box.images >= images && box.rows + box.columns >= 2;
}

constexpr int kLog2MostSegments = 2;  // measured: 8 were never faster

// The slopes of leaky_relu: in memory, one for all channels (step 0) or one for each (1), or a
// number.
struct Slopes {
  const float* first;  // may be null
  int step;
  float number;

  __device__ float of(int channel, int channels) const {
    return first != nullptr && channel < channels ? first[channel * step] : number;
  }
};

// Parameters that all Hopper convolutions have.
struct ConvOperands {
  CUtensorMap map_input, map_weight, map_output, map_residual;
  ConvShape shape;
  const void* bias;      // may be null
  const void* residual;  // like the output; may be null
  Activation activation;
  Slopes slopes;
  void* output;
  int box_groups;  // groups of 64 channels
  int channel_tiles, tiles, steps;
  Divisor by_channel_tiles, by_box_rows, by_box_columns;
};

struct ConvParams : ConvOperands {
  CUtensorMap map_last;  // of the input, for the last box of images if it is only partly filled
  Log2Block block, box;
  Extent blocks, boxes;  // in the output
  // A pixel block is one pixel of more images than there are, and a box is several pixels of one or
  // more images. Each pixel is judged by itself. The caller then sets `box`.
  bool by_pixel;
  uint64_t* valid_pixels;  // by_pixel: what valid_pixels() finds (block_norms.cuh)
  bool images_fastest;  // the order of boxes is images, columns, rows; else columns, rows, images
  int log2_block_m, log2_block_k;
  int norm_groups;  // groups of max(block k, 64) channels
  // (blocks of out_channels, kernel positions x norm_groups). May be null if norm_input is.
  const float* norm_weight;
  Im2colNorms<float> norm_input;  // null: none were taken, as nothing is skipped but padding
  Tau<float> tau;
  // Output norms, for pixel blocks of 64 images at one pixel: (image blocks, rows, columns, channel
  // groups). May be null. Boxes have 64 images, or by_pixel and takes_norms_of_pixels().
  float* norm_output;
  Divisor by_box_images, by_box_groups, by_kernel_columns;
  int* next_tile;     // zero before and after; null: tiles are not claimed, see claim_tile()
  int log2_segments;  // of a tile's steps (segments.cuh); 0: the kernel has no segments
};

// Norms of the weight for one block of output channels, which are those of one pixel's window.
__host__ __device__ inline int norms_of_block(const ConvParams& p) {
  return p.shape.kernel.rows * p.shape.kernel.columns * p.norm_groups;
}

// The kernel that judges the pixels of boxes, if these are judged one by one (block_norms.cuh).
cudaError_t launch_valid_pixels(const ConvParams& params, cudaStream_t stream);

// float32 in split parts (split.cuh), which are read instead of the tensor maps. Weight: (kernel
// positions, blocks of out_channels, blocks of channels). Input: (pixels, blocks of images, of
// channels).
struct SplitConvParams : ConvParams {
  SplitSource a, b;
};

// Parameters where nothing is skipped (unskipped.cuh). Boxes are single pixels there. `tiles`
// counts what clusters compute at a time, and `channel_tiles` what lies along the channels of it.
struct UnskippedParams : ConvOperands {
  bool in_order;        // output pixels read the input pixels of the same numbers
  bool shares_weights;  // a cluster has two pixel tiles of one channel tile; else the other way
};

// Tells whether every output pixel reads the input pixel of the same number, and no other.
inline bool reads_pixels_in_order(const ConvShape& shape) {
  const auto is = [](Size2 size, int value) { return size.rows == value && size.columns == value; };
  return is(shape.kernel, 1) && is(shape.stride, 1) && is(shape.padding, 0);
}

// Tells whether the kernel where nothing is skipped (unskipped.cuh) can compute a convolution:
// TMA's im2col mode allows strides up to 8, offsets within a window below 256 and windows that
// start and end at most 128 pixels outside.
inline bool takes_unskipped(const ConvShape& shape) {
  const auto fits = [](int kernel, int stride, int padding, int dilation) {
    const int64_t reach = int64_t{kernel - 1} * dilation;
    return stride <= 8 && reach < 256 && padding <= 127 && reach - padding <= 128;
  };
  return fits(shape.kernel.rows, shape.stride.rows, shape.padding.rows, shape.dilation.rows) &&
         fits(shape.kernel.columns, shape.stride.columns, shape.padding.columns,
              shape.dilation.columns);
}

}  // namespace spamm::kernels::conv::sm90
