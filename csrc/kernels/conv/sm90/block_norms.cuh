// Computes the norms of im2col blocks from the norms of pixels (norms.cuh): the root of the sum of
// squares over the existing pixels of a block.
#pragma once

#include "kernels/common/launch.cuh"
#include "kernels/conv/sm90/norms.cuh"

namespace spamm::kernels::conv::sm90 {

// The root of the sum of squares of the values that for_each() visits. If the sum overflows or
// underflows, the values are visited again and scaled.
template <class ForEach>
__device__ float root_of_squares(const ForEach& for_each) {
  float sum = 0, largest = 0;
  for_each([&](float x) {
    sum = fmaf(x, x, sum);
    largest = larger_or_nan(x, largest);
  });
  if (is_safe(sum)) return sqrtf(sum);
  const ScaledNorm<float> scaled(largest);
  sum = 0;
  if (scaled.is_number()) for_each([&](float x) { sum = scaled.add(sum, x); });
  return scaled.norm(sum);
}

__global__ void __launch_bounds__(kNormThreads)
    block_norms(const __grid_constant__ BlockNormsParams p) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  const int positions = p.shape.kernel.rows * p.shape.kernel.columns;
  const int depth = positions * p.groups;
  const int64_t total =
      static_cast<int64_t>(p.blocks.images) * p.blocks.rows * p.blocks.columns * depth;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kNormThreads + threadIdx.x;
  if (p.zeroed != nullptr && index == 0) *p.zeroed = 0;
  if (index >= total) return;
  const auto number = static_cast<int>(index / depth);
  const int k = index - static_cast<int64_t>(number) * depth;
  const int kernel_position = k / p.groups, group = k - kernel_position * p.groups;
  const int kernel_row = kernel_position / p.shape.kernel.columns;
  const int kernel_column = kernel_position - kernel_row * p.shape.kernel.columns;
  const int line = number / p.blocks.columns, image = line / p.blocks.rows;
  const int first_row = (line - image * p.blocks.rows) << p.block.rows;
  const int first_column = (number - line * p.blocks.columns) << p.block.columns;
  const int end_row = min(first_row + (1 << p.block.rows), p.shape.output.rows);
  const int end_column = min(first_column + (1 << p.block.columns), p.shape.output.columns);
  const float* norms = p.pixel_norms + static_cast<int64_t>(image) * p.shape.input.rows *
                                           p.shape.input.columns * p.groups;
  p.norms[index] = root_of_squares([&](const auto& visit) {
    for (int row = first_row; row < end_row; ++row) {
      const int y =
          row * p.shape.stride.rows - p.shape.padding.rows + kernel_row * p.shape.dilation.rows;
      if (static_cast<unsigned>(y) >= static_cast<unsigned>(p.shape.input.rows)) continue;
      for (int column = first_column; column < end_column; ++column) {
        const int x = column * p.shape.stride.columns - p.shape.padding.columns +
                      kernel_column * p.shape.dilation.columns;
        if (static_cast<unsigned>(x) >= static_cast<unsigned>(p.shape.input.columns)) continue;
        visit(norms[(static_cast<int64_t>(y) * p.shape.input.columns + x) * p.groups + group]);
      }
    }
  });
}

inline cudaError_t launch_block_norms(const BlockNormsParams& p, cudaStream_t stream) {
  const int64_t norms = static_cast<int64_t>(p.blocks.images) * p.blocks.rows * p.blocks.columns *
                        p.shape.kernel.rows * p.shape.kernel.columns * p.groups;
  return launch(block_norms, static_cast<unsigned>((norms - 1) / kNormThreads + 1), kNormThreads, 0,
                /*overlap_previous=*/true, stream, p);
}

}  // namespace spamm::kernels::conv::sm90
