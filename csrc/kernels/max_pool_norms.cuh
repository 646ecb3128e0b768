// Max pooling that leaves the norms of its output for the convolution that follows.
//
// A thread has 8 channels of some images at one pixel of the output, as in the pass over an input
// for norms (conv_norms.cuh), and takes the norms in the same order: they are those of that pass.
#pragma once

#include <cstdint>

#include "conv_norms.cuh"
#include "overlap.cuh"

namespace spamm::kernels::conv {

constexpr int kLog2PoolSlices = log2_slices(6), kLog2PoolLanes = 3;

template <class Element>
__device__ __forceinline__ Element lowest() {
  return narrow<Element>(-INFINITY);
}

// Entry by entry as torch does: the first of equal ones, and NaN wherever there is one.
template <class Element>
__device__ __forceinline__ void keep_largest(Chunk<Element>& best, const Chunk<Element>& chunk) {
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    const float x = widen(chunk.entries[e]);
    if (x > widen(best.entries[e]) || x != x) best.entries[e] = chunk.entries[e];
  }
}

// Pools and stores the thread's part, and visits what it stored. Several loads are in flight.
template <class Element, class Thread, class Visit>
__device__ __forceinline__ void pool(const MaxPoolParams& p, const Thread& thread,
                                     const Visit& visit) {
  constexpr int kUnroll = 4;
  const int row = thread.pixel / p.out_size.columns;
  const int first_row = row * p.stride.rows - p.padding.rows;
  const int first_column =
      (thread.pixel - row * p.out_size.columns) * p.stride.columns - p.padding.columns;
  const int64_t in_image =
      static_cast<int64_t>(p.in_size.rows) * p.in_size.columns * p.job.channels / 8;
  const int64_t out_image = static_cast<int64_t>(p.job.pixels) * p.job.channels / 8;
  const auto* input = static_cast<const Chunk<Element>*>(p.input) + thread.channel / 8;
  auto* output = static_cast<Chunk<Element>*>(p.output) + thread.channel / 8 +
                 static_cast<int64_t>(thread.pixel) * p.job.channels / 8;
  for (int i = 0; i < thread.count; i += kUnroll) {
    const auto image = [&](int u) { return thread.first_image + ((i + u) << kLog2PoolSlices); };
    Chunk<Element> best[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
#pragma unroll
      for (int e = 0; e < 8; ++e) best[u].entries[e] = lowest<Element>();
    }
    for (int y = 0; y < p.kernel.rows; ++y) {
#pragma unroll 1
      for (int x = 0; x < p.kernel.columns; ++x) {
        const int in_row = first_row + y * p.dilation.rows;
        const int in_column = first_column + x * p.dilation.columns;
        if (in_row < 0 || in_row >= p.in_size.rows || in_column < 0 ||
            in_column >= p.in_size.columns) {
          continue;
        }
        const auto* pixel = input + (static_cast<int64_t>(in_row) * p.in_size.columns + in_column) *
                                        p.job.channels / 8;
        uint4 words[kUnroll];
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
          words[u] = load_once(pixel + image(u) * in_image, i + u < thread.count);
        }
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
          keep_largest(best[u], __builtin_bit_cast(Chunk<Element>, words[u]));
        }
      }
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (i + u >= thread.count) continue;
      output[image(u) * out_image] = best[u];
#pragma unroll
      for (int e = 0; e < 8; ++e) visit(widen(best[u].entries[e]), e);
    }
  }
}

template <class Element>
__global__ void __launch_bounds__(kNormThreads, 2)
    max_pool(const __grid_constant__ MaxPoolParams p) {
  let_next_kernel_start();
  const NormThread<kLog2PoolSlices, kLog2PoolLanes> thread(p.job, blockIdx.x);
  wait_for_previous_kernel();
  const float norm = norm_of_entries<Element, kLog2PoolSlices, kLog2PoolLanes>(
      [&](const auto& visit) { pool<Element>(p, thread, visit); });
  if (thread.stores) p.job.norms[thread.norm] = norm;
}

}  // namespace spamm::kernels::conv
