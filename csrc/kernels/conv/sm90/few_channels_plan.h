// Parameters of the convolution of few input channels, and how it cuts its work.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <iterator>
#include <optional>

#include "kernels/common/parameters.h"
#include "kernels/conv/sm90/params.h"

namespace spamm::kernels::conv::sm90 {

constexpr int kFewChannelsThreads = 256, kFewChannelsWarpgroups = 2;
constexpr int kFewChannelsSharedBytes = 451 * 512;     // of a multiprocessor
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
  bool masked;               // products may be skipped
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

// Norms for a held tau. A pixel block is one pixel of several images, and the 64 output channels of
// a thread block are of one block.
struct HeldNorms {
  const float* pixels;   // (image blocks, input rows, input columns)
  const float* weights;  // (blocks of output channels, kernel positions)
  Tau<float> tau;
  int log2_images, log2_block_m;
};

// In shared memory: the norms of the weight, from the largest on, and the least rank of a pixel
// with which a kernel position is valid. Ranks of entries follow.
constexpr int kMostMaskedPositions = 127;
struct PixelRanks {
  float ordered[kMostMaskedPositions + 1];
  uint8_t least[kMostMaskedPositions + 1];
};

// Contiguous channels-last tensors, dilation 1 along the columns, a multiple of 8 output channels.
// Output and residual start at multiples of 16 bytes.
struct FewChannelsParams {
  const void *input, *weight, *bias, *residual;  // bias and residual may be null
  void* output;
  float* norms;  // output norms, like ConvParams::norm_output; may be null. They need along_images
  ConvShape shape;
  Activation activation;
  Slopes slopes;
  int together;  // entries of the input that are copied at a time: 8, 2 or 1
  FewChannelsPlan plan;
  // Set by the launch.
  int tiles = 0;
  Divisor by_column_tiles{}, by_row_tiles{}, by_strips{}, by_patch_rows{};
  HeldNorms held{};  // by the caller, if plan.masked
};
template <class Element>
cudaError_t launch_few_channels(FewChannelsParams params, int multiprocessors, cudaStream_t stream);

inline FewChannelsWindow few_channels_window(const ConvShape& shape) {
  const int entries = shape.kernel.columns * shape.channels;
  const int parities = shape.stride.columns * shape.channels % 2 + 1;
  const int first = shape.padding.columns * shape.channels % 2;
  const int most_leading = parities == 2 ? 1 : first;
  return {entries, parities, first, ceil_div(most_leading + entries, 2)};
}

// The steps of the kernels there are. Several passes have a multiple of 4, whole blocks of weights.
constexpr int kFewChannelsSteps[] = {2, 3, 5, 8, 10}, kStepsOfSeveralPasses = 8;

inline void set_steps(FewChannelsPlan& plan, int kernel_rows) {
  const int steps = ceil_div(plan.window.pairs * kernel_rows, 8);
  const auto* enough = std::ranges::find_if(kFewChannelsSteps, [&](int n) { return n >= steps; });
  plan.steps = enough == std::end(kFewChannelsSteps) ? kStepsOfSeveralPasses : *enough;
  plan.passes = ceil_div(steps, plan.steps);
}

// Weights, places of pairs, biases, slopes, two patches and ranks.
inline int few_channels_shared_bytes(const FewChannelsPlan& plan) {
  constexpr int kBlockBytes = 64 * 128, kStepBytes = 8 * 4, kChannelBytes = 64 * 8;
  const int of_parity = plan.weight_blocks() * kBlockBytes + plan.all_steps() * kStepBytes;
  const int ranks = plan.masked ? static_cast<int>(sizeof(PixelRanks)) + plan.patch() : 0;
  return plan.window.parities * of_parity + kChannelBytes + 2 * plan.patch() * 2 + ranks;
}

// Thread blocks that a multiprocessor runs at once, at most two; 0: the plan does not fit.
inline int few_channels_blocks(const FewChannelsPlan& plan) {
  constexpr int kReserved = 1024;
  constexpr int kMostDistance = (1 << 16) / 2;  // in entries; see PairPlace
  if (plan.image > kMostDistance) return 0;
  return std::min(kFewChannelsSharedBytes / (few_channels_shared_bytes(plan) + kReserved), 2);
}

// A tile of so many rows and strips.
inline FewChannelsPlan cut_few_channels(const ConvShape& shape, bool along_images, int rows,
                                        int strips, bool masked) {
  FewChannelsPlan plan{};
  plan.window = few_channels_window(shape);
  set_steps(plan, shape.kernel.rows);
  plan.along_images = along_images;
  plan.masked = masked;
  plan.rows = rows;
  plan.strips = strips;
  plan.columns = along_images ? kImageTileColumns : strips * kStripPixels * plan.window.parities;
  plan.images = along_images ? kImageTile : 1;
  plan.output_step = shape.stride.rows;
  if (rows == 1) {
    plan.patch_rows = shape.kernel.rows;
    plan.row_step = shape.dilation.rows;
    plan.kernel_step = 1;
  } else {
    plan.patch_rows =
        (rows - 1) * shape.stride.rows + (shape.kernel.rows - 1) * shape.dilation.rows + 1;
    plan.row_step = 1;
    plan.kernel_step = shape.dilation.rows;
  }
  // Up to 7 entries lie before the first window, because a row is copied in chunks; and up to 2
  // behind the last one.
  const int used = (plan.columns - 1) * shape.stride.columns * shape.channels + plan.window.entries;
  plan.line = ceil_div(used + 7 + 2, 8) * 8;
  // Cut off where it cannot fit, so that no product overflows.
  constexpr int64_t kTooLarge = 1 << 20;
  plan.image = static_cast<int>(std::min(int64_t{plan.patch_rows} * plan.line, kTooLarge));
  // An odd multiple of 16 bytes, so that eight images lie in different banks.
  if (along_images && plan.image % 16 == 0) plan.image += 8;
  // A warp for a row, or less where a row has fewer chunks of 8 entries.
  const auto chunks = static_cast<uint32_t>(plan.line / 8);
  plan.log2_row_threads = std::min<int>(std::bit_width(chunks - 1), 5);
  return plan;
}

inline int few_channels_column_tiles(const ConvShape& shape, const FewChannelsPlan& plan) {
  return ceil_div(shape.output.columns, plan.columns);
}
inline int few_channels_tiles(const ConvShape& shape, const FewChannelsPlan& plan) {
  return ceil_div(shape.output.images, plan.images) * ceil_div(shape.output.rows, plan.rows) *
         few_channels_column_tiles(shape, plan);
}

// Thread blocks that run at once for 64 output channels.
inline int few_channels_grid(const ConvShape& shape, const FewChannelsPlan& plan,
                             int multiprocessors) {
  return ceil_div(few_channels_blocks(plan) * multiprocessors, ceil_div(shape.out_channels, 64));
}

// The time of the thread block with the most tiles. A unit is half a product with its epilogue.
inline int64_t few_channels_cost(const ConvShape& shape, const FewChannelsPlan& plan,
                                 int multiprocessors) {
  const int products = ceil_div(plan.rows * plan.strips, kStripsOfProduct);
  const int of_warpgroup =
      plan.window.parities == 2 ? products : ceil_div(products, kFewChannelsWarpgroups);
  const int blocks = few_channels_grid(shape, plan, multiprocessors);
  return int64_t{ceil_div(few_channels_tiles(shape, plan), blocks)} * (2 * of_warpgroup + 1);
}

// The plan for a shape; none if not even the smallest tile fits, which does not depend on the
// number of images or multiprocessors. Output norms need tiles along images, which have no masks.
inline std::optional<FewChannelsPlan> plan_few_channels(const ConvShape& shape, bool along_images,
                                                        int multiprocessors, bool masked = false) {
  constexpr int kMostStrips = 16, kMostOfTile = 32;
  const int parities = few_channels_window(shape).parities;
  const int of_row = ceil_div(shape.output.columns, kStripPixels * parities);
  int strips = along_images ? 1 : ceil_div(of_row, ceil_div(of_row, kMostStrips));
  FewChannelsPlan best = cut_few_channels(shape, along_images, 1, strips, masked);
  while (strips > 1 && few_channels_blocks(best) < 2) {
    strips = ceil_div(strips, 2);
    best = cut_few_channels(shape, along_images, 1, strips, masked);
  }
  if (few_channels_blocks(best) == 0) return std::nullopt;
  if (along_images) return best;
  for (const int rows : {2, 4, 8, 16}) {
    if (rows * strips > kMostOfTile || rows > shape.output.rows) break;
    const FewChannelsPlan plan = cut_few_channels(shape, false, rows, strips, masked);
    if (few_channels_blocks(plan) == 2 && few_channels_cost(shape, plan, multiprocessors) <=
                                              few_channels_cost(shape, best, multiprocessors)) {
      best = plan;
    }
  }
  return best;
}

}  // namespace spamm::kernels::conv::sm90
