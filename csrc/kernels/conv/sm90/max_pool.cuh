// Max pooling with output norms.
//
// A thread block computes one norm: an output pixel, 64 images, 64 channels. A thread pools 8
// channels of two images, with all loads of a 2 x 2 window in flight. Then the threads of a warp
// exchange their results: each sums the squares that it would sum in the norm pass (norms.cuh), in
// the same order, so the norms have the same bits as that pass.
#pragma once

#include <cstdint>

#include "kernels/common/launch.cuh"
#include "kernels/common/overlap.cuh"
#include "kernels/conv/sm90/norms.cuh"

namespace spamm::kernels::conv::sm90 {

// As in the norm pass, except that the lanes that have neighbouring norms there share one norm
// here.
constexpr int kLog2PoolSlices = log2_slices(6), kLog2PoolLanes = 3;
constexpr int kPoolParts = 1 << log2_norms(kLog2PoolSlices, kLog2PoolLanes);
constexpr int kImagesAPart = (64 >> kLog2PoolSlices) / kPoolParts;
static_assert(kPoolParts << kLog2PoolLanes == 32, "a warp is a slice");

template <class Element>
__device__ __forceinline__ Element lowest() {
  return narrow<Element>(-INFINITY);
}

// Per entry, like torch: keeps the first of equal values, and NaN if there is one.
template <class Element>
__device__ __forceinline__ void keep_largest(Chunk<Element>& best, const Chunk<Element>& chunk) {
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    const float x = widen(chunk.entry(e));
    if (x > widen(best.entry(e)) || x != x) best.replace(e, chunk.entry(e));
  }
}

// The norm, pixel, channels and images of a thread.
struct PoolThread {
  int norm;  // in job.norms
  int row, column, channel;
  int slice, part;
  int first_image, end_image;

  __device__ __forceinline__ PoolThread(const MaxPoolParams& p, int number) : norm(number) {
    const int line = number / p.job.groups, image_block = line / p.job.pixels;
    const int pixel = line - image_block * p.job.pixels;
    const int lane = threadIdx.x % (1 << kLog2PoolLanes);
    row = pixel / p.out_size.columns;
    column = pixel - row * p.out_size.columns;
    channel = (number - line * p.job.groups) * 64 + lane * 8;
    slice = threadIdx.x / 32;
    part = threadIdx.x % 32 >> kLog2PoolLanes;
    first_image = image_block * 64;
    end_image = channel < p.job.channels ? min(p.job.images, first_image + 64) : first_image;
  }

  // Image `i` of the slice, in the order of the norm pass.
  __device__ __forceinline__ int image(int i) const {
    return first_image + (i << kLog2PoolSlices) + slice;
  }
};

// The largest values of the window for the thread's own images.
template <class Element>
__device__ __forceinline__ void pool(const MaxPoolParams& p, const PoolThread& thread,
                                     Chunk<Element> (&best)[kImagesAPart]) {
  constexpr int kPositions = 4;  // in flight
  const int first_row = thread.row * p.stride.rows - p.padding.rows;
  const int first_column = thread.column * p.stride.columns - p.padding.columns;
  const int64_t line = static_cast<int64_t>(p.in_size.columns) * p.job.channels;
  const auto* input = static_cast<const Element*>(p.input) + thread.channel;
#pragma unroll
  for (auto& chunk : best) {
#pragma unroll
    for (int e = 0; e < 8; ++e) chunk.replace(e, lowest<Element>());
  }
  const int positions = p.kernel.rows * p.kernel.columns;
#pragma unroll 1
  for (int first = 0; first < positions; first += kPositions) {
    uint4 words[kPositions][kImagesAPart];
    bool inside[kPositions];
#pragma unroll
    for (int i = 0; i < kPositions; ++i) {
      const int y = (first + i) / p.kernel.columns, x = first + i - y * p.kernel.columns;
      const int row = first_row + y * p.dilation.rows;
      const int column = first_column + x * p.dilation.columns;
      inside[i] = first + i < positions && static_cast<unsigned>(row) < p.in_size.rows &&
                  static_cast<unsigned>(column) < p.in_size.columns;
#pragma unroll
      for (int u = 0; u < kImagesAPart; ++u) {
        const int image = thread.image(thread.part * kImagesAPart + u);
        words[i][u] =
            load_once(input + (static_cast<int64_t>(image) * p.in_size.rows + row) * line +
                          static_cast<int64_t>(column) * p.job.channels,
                      inside[i] && image < thread.end_image);
      }
    }
#pragma unroll
    for (int i = 0; i < kPositions; ++i) {
      if (!inside[i]) continue;
#pragma unroll
      for (int u = 0; u < kImagesAPart; ++u) {
        keep_largest(best[u], __builtin_bit_cast(Chunk<Element>, words[i][u]));
      }
    }
  }
}

// The chunk of image `i` of the slice, from the lane that has it.
template <class Element>
__device__ __forceinline__ Chunk<Element> of_number(const Chunk<Element> (&best)[kImagesAPart],
                                                    int i) {
  const int source = threadIdx.x % (1 << kLog2PoolLanes) | i / kImagesAPart << kLog2PoolLanes;
  uint4 words = __builtin_bit_cast(uint4, best[i % kImagesAPart]);
  words.x = __shfl_sync(~0u, words.x, source);
  words.y = __shfl_sync(~0u, words.y, source);
  words.z = __shfl_sync(~0u, words.z, source);
  words.w = __shfl_sync(~0u, words.w, source);
  return __builtin_bit_cast(Chunk<Element>, words);
}

template <class Element>
__global__ void __launch_bounds__(kNormThreads, 4)
    max_pool(const __grid_constant__ MaxPoolParams p) {
  let_next_kernel_start();
  const PoolThread thread(p, blockIdx.x);
  wait_for_previous_kernel();
  Chunk<Element> best[kImagesAPart];
  pool<Element>(p, thread, best);
  auto* output = static_cast<Element*>(p.output) + thread.channel;
#pragma unroll
  for (int u = 0; u < kImagesAPart; ++u) {
    const int image = thread.image(thread.part * kImagesAPart + u);
    if (image < thread.end_image) {
      const int64_t pixel =
          (static_cast<int64_t>(image) * p.out_size.rows + thread.row) * p.out_size.columns +
          thread.column;
      *reinterpret_cast<Chunk<Element>*>(output + pixel * p.job.channels) = best[u];
    } else {
      best[u] = {};
    }
  }
  const float norm =
      norm_of_chunks<Element, kLog2PoolSlices, kLog2PoolLanes>([&](const auto& visit) {
#pragma unroll
        for (int i = 0; i < kPoolParts * kImagesAPart; ++i) visit(of_number(best, i));
      });
  if (threadIdx.x == 0) p.job.norms[thread.norm] = norm;
}

template <class Element>
cudaError_t launch_max_pool(const MaxPoolParams& p, cudaStream_t stream) {
  const int norms = ceil_div(p.job.images, 64) * p.job.pixels * p.job.groups;
  return launch(max_pool<Element>, norms, kNormThreads, 0, /*overlap_previous=*/true, stream, p);
}

}  // namespace spamm::kernels::conv::sm90
