// Computes the norms of im2col blocks from the norms of pixels (norms.cuh): the root of the sum of
// squares over the existing pixels of a block. And what clears a tile counter where no norms are
// computed.
#pragma once

#include "kernels/common/launch.cuh"
#include "kernels/common/overlap.cuh"
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

__device__ __forceinline__ BlockPixels block_pixels(const BlockNormsParams& p, int number,
                                                    int depth) {
  const int kernel_position = depth / p.groups, group = depth - kernel_position * p.groups;
  const int kernel_row = kernel_position / p.shape.kernel.columns;
  const int kernel_column = kernel_position - kernel_row * p.shape.kernel.columns;
  const int line = number / p.blocks.columns, image = line / p.blocks.rows;
  const int first_row = (line - image * p.blocks.rows) << p.block.rows;
  const int first_column = (number - line * p.blocks.columns) << p.block.columns;
  const int64_t pixels = static_cast<int64_t>(p.shape.input.rows) * p.shape.input.columns;
  return {.norms = p.pixel_norms + image * pixels * p.groups + group,
          .first_row = first_row,
          .first_column = first_column,
          .kernel_row = kernel_row * p.shape.dilation.rows,
          .kernel_column = kernel_column * p.shape.dilation.columns,
          .existing_rows = p.shape.output.rows - first_row,
          .existing_columns = p.shape.output.columns - first_column};
}

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
  const BlockPixels pixels =
      block_pixels(p, number, static_cast<int>(index - static_cast<int64_t>(number) * depth));
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
