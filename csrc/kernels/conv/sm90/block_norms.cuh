// Computes the norms of im2col blocks from those of pixels (norms.cuh): the root of the sum of
// squares over a block's existing pixels. And clears tile counters where no norms are computed.
#pragma once

#include <algorithm>

#include "kernels/common/launch.cuh"
#include "kernels/common/overlap.cuh"
#include "kernels/common/skip_test.cuh"
#include "kernels/conv/sm90/norms.cuh"

namespace spamm::kernels::conv::sm90 {

// Neighbouring threads share the pixels of a block, at most so many.
constexpr int kLog2MostSharing = 3;
__host__ __device__ inline int log2_sharing(const Log2Block& block) {
  const int pixels = block.rows + block.columns;
  return pixels < kLog2MostSharing ? pixels : kLog2MostSharing;
}

// Combines the values of the threads that share a block; all of them get the result.
template <class Combine>
__device__ __forceinline__ float of_sharing(float x, int sharing, const Combine& combine) {
  const unsigned threads = ((1u << sharing) - 1) << (threadIdx.x % 32 & ~(sharing - 1));
  for (int distance = 1; distance < sharing; distance *= 2) {
    x = combine(x, __shfl_xor_sync(threads, x, distance));
  }
  return x;
}

// The root of the sum of squares of the values that the calls of for_each() by `sharing` threads
// visit. If the sum overflows or underflows, the values are visited again and scaled.
template <class ForEach>
__device__ float root_of_squares(int sharing, const ForEach& for_each) {
  const auto add = [](float x, float y) { return x + y; };
  float sum = 0, largest = 0;
  for_each([&](float x) {
    sum = fmaf(x, x, sum);
    largest = larger_or_nan(x, largest);
  });
  sum = of_sharing(sum, sharing, add);
  if (is_safe(sum)) return sqrtf(sum);
  largest = of_sharing(largest, sharing, [](float x, float y) { return larger_or_nan(y, x); });
  const ScaledNorm<float> scaled(largest);
  sum = 0;
  if (scaled.is_number()) for_each([&](float x) { sum = scaled.add(sum, x); });
  return scaled.norm(of_sharing(sum, sharing, add));
}

// The place of the norms of a block's pixels for one kernel position and channel group.
struct BlockPixels {
  const float* norms;                   // of the image and the group
  int first_row, first_column;          // of the output
  int kernel_row, kernel_column;        // in pixels
  int existing_rows, existing_columns;  // of the block

  __device__ __forceinline__ BlockPixels(const BlockNormsParams& p, int number, int depth) {
    const int kernel_position = depth / p.groups, group = depth - kernel_position * p.groups;
    const int line_of_kernel = kernel_position / p.shape.kernel.columns;
    kernel_row = line_of_kernel * p.shape.dilation.rows;
    kernel_column =
        (kernel_position - line_of_kernel * p.shape.kernel.columns) * p.shape.dilation.columns;
    const int line = number / p.blocks.columns, image = line / p.blocks.rows;
    first_row = (line - image * p.blocks.rows) << p.block.rows;
    first_column = (number - line * p.blocks.columns) << p.block.columns;
    existing_rows = p.shape.output.rows - first_row;
    existing_columns = p.shape.output.columns - first_column;
    const int64_t pixels = static_cast<int64_t>(p.shape.input.rows) * p.shape.input.columns;
    norms = p.pixel_norms + image * pixels * p.groups + group;
  }

  // The norm of pixel `i` of the block; 0 for one that does not exist, or lies in the padding.
  __device__ __forceinline__ float at(const BlockNormsParams& p, int i) const {
    const int row = i >> p.block.columns, column = i & ((1 << p.block.columns) - 1);
    const int y = (first_row + row) * p.shape.stride.rows - p.shape.padding.rows + kernel_row;
    const int x =
        (first_column + column) * p.shape.stride.columns - p.shape.padding.columns + kernel_column;
    const bool exists = row < existing_rows && column < existing_columns &&
                        static_cast<unsigned>(y) < static_cast<unsigned>(p.shape.input.rows) &&
                        static_cast<unsigned>(x) < static_cast<unsigned>(p.shape.input.columns);
    return exists ? norms[(static_cast<int64_t>(y) * p.shape.input.columns + x) * p.groups] : 0;
  }
};

__global__ void __launch_bounds__(kNormThreads)
    block_norms(const __grid_constant__ BlockNormsParams p) {
  constexpr int kInFlight = 8;
  let_next_kernel_start();
  const int depth = p.shape.kernel.rows * p.shape.kernel.columns * p.groups;
  const int64_t total =
      static_cast<int64_t>(p.blocks.images) * p.blocks.rows * p.blocks.columns * depth;
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kNormThreads + threadIdx.x;
  const int sharing = 1 << log2_sharing(p.block), volume = 1 << (p.block.rows + p.block.columns);
  const int64_t index = thread / sharing;
  wait_for_previous_kernel();
  if (p.zeroed != nullptr && thread == 0) *p.zeroed = 0;
  if (index >= total) return;
  const auto number = static_cast<int>(index / depth);
  const BlockPixels pixels(p, number,
                           static_cast<int>(index - static_cast<int64_t>(number) * depth));
  const float norm = root_of_squares(sharing, [&](const auto& visit) {
    for (int i = threadIdx.x % sharing; i < volume; i += kInFlight * sharing) {
      float found[kInFlight];
#pragma unroll
      for (int u = 0; u < kInFlight; ++u) {
        found[u] = i + u * sharing < volume ? pixels.at(p, i + u * sharing) : 0;
      }
#pragma unroll
      for (const float x : found) visit(x);
    }
  });
  if (threadIdx.x % sharing == 0) p.norms[index] = norm;
}

cudaError_t launch_block_norms(const BlockNormsParams& p, cudaStream_t stream) {
  const int64_t norms = static_cast<int64_t>(p.blocks.images) * p.blocks.rows * p.blocks.columns *
                        p.shape.kernel.rows * p.shape.kernel.columns * p.groups;
  const int64_t threads = norms << log2_sharing(p.block);
  return launch(block_norms, static_cast<unsigned>((threads - 1) / kNormThreads + 1), kNormThreads,
                0, /*overlap_previous=*/true, stream, p);
}

// ---- By pixel ----------------------------------------------------------------------------------

constexpr int kJudgingThreads = 128;
constexpr int kStepsOfWarp = 4;  // whose loads are in flight together

// For each box of pixels, block of output channels, kernel position and channel group (norms of the
// weight): bit i tells whether the product is valid for pixel i of the box. All bits are set if it
// is for all existing pixels that are not zeros. A lane has a pixel of a box, or two of 64.
__global__ void __launch_bounds__(kJudgingThreads)
    valid_pixels(const __grid_constant__ ConvParams p) {
  let_next_kernel_start();
  const int log2_pixels = p.box.rows + p.box.columns, log2_lanes = min(log2_pixels, 5);
  const int boxes = p.boxes.rows * p.boxes.columns, depth = norms_of_block(p);
  const int chunks = (depth - 1) / kStepsOfWarp + 1, lane = threadIdx.x % 32;
  const int warp = (blockIdx.x * kJudgingThreads + threadIdx.x) / 32, group = warp / chunks;
  const int first = (warp - group * chunks) * kStepsOfWarp, first_box = group << (5 - log2_lanes);
  if (first_box >= boxes) return;
  const int box = first_box + (lane >> log2_lanes), first_lane = lane >> log2_lanes << log2_lanes;
  const int box_row = box / p.boxes.columns, box_column = box - box_row * p.boxes.columns;
  const float scale = partial_block_scale(static_cast<float>(1 << p.block.images),
                                          static_cast<float>(p.shape.output.images));

  wait_for_previous_kernel();
  const float tau = p.tau.value();
  bool exists[2];
  float norms[2][kStepsOfWarp], weights[kStepsOfWarp];
#pragma unroll
  for (int s = 0; s < kStepsOfWarp; ++s) {
    weights[s] = p.norm_weight[blockIdx.y * depth + min(first + s, depth - 1)];
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int pixel = lane - first_lane + 32 * half;
    const int row = (box_row << p.box.rows) + (pixel >> p.box.columns);
    const int column = (box_column << p.box.columns) + (pixel & ((1 << p.box.columns) - 1));
    exists[half] = box < boxes && pixel >> log2_pixels == 0 && row < p.shape.output.rows &&
                   column < p.shape.output.columns;
#pragma unroll
    for (int s = 0; s < kStepsOfWarp; ++s) {
      const int position = (first + s) / p.norm_groups;
      const int kernel_row = position / p.shape.kernel.columns;
      const int kernel_column = position - kernel_row * p.shape.kernel.columns;
      const int y =
          row * p.shape.stride.rows - p.shape.padding.rows + kernel_row * p.shape.dilation.rows;
      const int x = column * p.shape.stride.columns - p.shape.padding.columns +
                    kernel_column * p.shape.dilation.columns;
      const bool reads = exists[half] && first + s < depth &&
                         static_cast<unsigned>(y) < static_cast<unsigned>(p.shape.input.rows) &&
                         static_cast<unsigned>(x) < static_cast<unsigned>(p.shape.input.columns);
      const int number =
          (y * p.shape.input.columns + x) * p.norm_groups + first + s - position * p.norm_groups;
      norms[half][s] = reads ? p.norm_input.norms[number] : 0;
    }
  }
  const uint32_t lanes = ~0u >> (32 - (1 << log2_lanes));
  uint64_t* const words =
      p.valid_pixels + (static_cast<int64_t>(box) * gridDim.y + blockIdx.y) * depth;
#pragma unroll
  for (int s = 0; s < kStepsOfWarp; ++s) {
    uint64_t valid = 0;
    bool lacks_some = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bool counts =
          exists[half] && is_valid_im2col(weights[s], norm_product(norms[half][s], scale), tau);
      const bool lacks = exists[half] && !counts && norms[half][s] != 0;
      valid |= static_cast<uint64_t>(__ballot_sync(~0u, counts) >> first_lane & lanes) << 32 * half;
      lacks_some |= (__ballot_sync(~0u, lacks) >> first_lane & lanes) != 0;
    }
    if (lane == first_lane && box < boxes && first + s < depth) {
      words[first + s] = valid != 0 && !lacks_some ? ~uint64_t{0} : valid;
    }
  }
}

cudaError_t launch_valid_pixels(const ConvParams& p, cudaStream_t stream) {
  const int log2_lanes = std::min(p.box.rows + p.box.columns, 5);
  const int groups = ((p.boxes.rows * p.boxes.columns - 1) >> (5 - log2_lanes)) + 1;
  const int64_t warps = int64_t{1} * groups * ceil_div(norms_of_block(p), kStepsOfWarp);
  const dim3 grid(static_cast<unsigned>((warps * 32 - 1) / kJudgingThreads + 1),
                  ((p.shape.out_channels - 1) >> p.log2_block_m) + 1);
  return launch(valid_pixels, grid, kJudgingThreads, 0, /*overlap_previous=*/true, stream, p);
}

// A kernel, because a memset would keep the convolution behind it from starting early.
__global__ void clear_counter(int* counter) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  if (threadIdx.x == 0) *counter = 0;
}

cudaError_t launch_clear_counter(int* counter, cudaStream_t stream) {
  return launch(clear_counter, 1, 32, 0, /*overlap_previous=*/true, stream, counter);
}

}  // namespace spamm::kernels::conv::sm90
