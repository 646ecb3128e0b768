// Max pooling with output norms.
//
// A thread block computes one norm: an output pixel, 64 images, 64 channels. A thread pools 8
// channels of two images, with all loads of a 2 x 2 window in flight. The norm pass (norms.cuh)
// sums the squares of 8 images in four chains of a thread. Here four threads have two images each,
// so they exchange entries, and each sums one chain in the order of that pass: the bits are the
// same.
#pragma once

#include <cstdint>

#include "kernels/common/launch.cuh"
#include "kernels/common/overlap.cuh"
#include "kernels/conv/sm90/norms.cuh"
#include "kernels/conv/sm90/pool_window.cuh"

namespace spamm::kernels::conv::sm90 {

// As in the norm pass, except that the lanes that have neighbouring norms there share one norm
// here.
constexpr int kLog2PoolLanes = 3, kPoolParts = 1 << log2_norms(/*log2_held=*/-1, kLog2PoolLanes);
constexpr int kImagesAPart = (64 >> kLog2Slices) / kPoolParts;
static_assert(kPoolParts << kLog2PoolLanes == 32, "a warp is a slice");

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

  // The thread's own image `u`, in the order of the norm pass.
  __device__ __forceinline__ int image(int u) const {
    return first_image + (part * kImagesAPart + u << kLog2Slices) + slice;
  }
};

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

// The entries of the thread's chain, of all images of its slice: entries `part` and `part` + 4 in
// one word. Threads that differ in their part alone exchange words, as when a 4 x 4 matrix is
// transposed.
template <class Element>
__device__ __forceinline__ void exchange_entries(const Chunk<Element> (&best)[kImagesAPart],
                                                 uint32_t (&words)[kPoolParts][kImagesAPart]) {
  static_assert(kPoolParts == 4, "one for each chain of norm_of_chunks()");
#pragma unroll
  for (int chain = 0; chain < kPoolParts; ++chain) {
#pragma unroll
    for (int u = 0; u < kImagesAPart; ++u) {
      words[chain][u] = __byte_perm(best[u].words[chain / 2], best[u].words[2 + chain / 2],
                                    chain % 2 == 0 ? 0x5410 : 0x7632);
    }
  }
#pragma unroll
  for (int bit = 1; bit < kPoolParts; bit *= 2) {
    const int distance = bit << kLog2PoolLanes;
    const bool upper = threadIdx.x & distance;
#pragma unroll
    for (int chain = 0; chain < kPoolParts; ++chain) {
      if (chain & bit) continue;
#pragma unroll
      for (int u = 0; u < kImagesAPart; ++u) {
        uint32_t &low = words[chain][u], &high = words[chain + bit][u];
        const uint32_t got = __shfl_xor_sync(~0u, upper ? low : high, distance);
        (upper ? low : high) = got;
      }
    }
  }
}

// The norm of what the threads of a block pooled; zeros for images that do not exist.
template <class Element>
__device__ __forceinline__ float norm_of_pooled(const Chunk<Element> (&best)[kImagesAPart]) {
  uint32_t words[kPoolParts][kImagesAPart];
  exchange_entries(best, words);
  float own = 0;
#pragma unroll
  for (const auto& of_part : words) {
#pragma unroll
    for (const uint32_t word : of_part) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const auto bits = static_cast<uint16_t>(word >> 16 * half);
        const float x = widen(__builtin_bit_cast(Element, bits));
        own = fmaf(x, x, own);
      }
    }
  }
#pragma unroll
  for (int bit = 1; bit < kPoolParts; bit *= 2) {
    own += __shfl_xor_sync(~0u, own, bit << kLog2PoolLanes);
  }
  __shared__ float shared[kNormThreads / 8];
  const float sum =
      combine_slices<kLog2PoolLanes>(own, shared, [](float x, float y) { return x + y; });
  if constexpr (!std::is_same_v<Element, __half>) {
    AnyNonzero<Element> any;
#pragma unroll
    for (const auto& chunk : best) any.add(chunk);
    if (__syncthreads_or(any.found() && !is_safe(sum))) {  // rare: entries are scaled
      const auto visit_own = [&](const auto& visit) {
#pragma unroll
        for (int i = 0; i < kPoolParts * kImagesAPart; ++i) visit(of_number(best, i));
      };
      return norm_of_chunks<Element>(
          SlicedChunks<kLog2PoolLanes, decltype(visit_own)>{visit_own, shared});
    }
  }
  return sqrtf(sum);
}

template <class Element>
__global__ void __launch_bounds__(kNormThreads, 4)
    max_pool(const __grid_constant__ MaxPoolParams p) {
  let_next_kernel_start();
  const PoolThread thread(p, blockIdx.x);
  const int64_t in_image =
      static_cast<int64_t>(p.in_size.rows) * p.in_size.columns * p.job.channels;
  const auto* input = static_cast<const Element*>(p.input) + thread.channel;
  const Element* images[kImagesAPart];
#pragma unroll
  for (int u = 0; u < kImagesAPart; ++u) {
    const int image = thread.image(u);
    images[u] = image < thread.end_image ? input + image * in_image : nullptr;
  }
  wait_for_previous_kernel();
  Chunk<Element> best[kImagesAPart];
  pool_window(p, p.job.channels, thread.row, thread.column, images, best);
  auto* output = static_cast<Element*>(p.output) + thread.channel;
#pragma unroll
  for (int u = 0; u < kImagesAPart; ++u) {
    if (images[u] != nullptr) {
      const int64_t pixel = (static_cast<int64_t>(thread.image(u)) * p.out_size.rows + thread.row) *
                                p.out_size.columns +
                            thread.column;
      *reinterpret_cast<Chunk<Element>*>(output + pixel * p.job.channels) = best[u];
    } else {
      best[u] = {};
    }
  }
  const float norm = norm_of_pooled(best);
  if (threadIdx.x == 0) p.job.norms[thread.norm] = norm;
}

template <class Element>
cudaError_t launch_max_pool(MaxPoolParams p, cudaStream_t stream) {
  const int norms = ceil_div(p.job.images, 64) * p.job.pixels * p.job.groups;
  return launch(max_pool<Element>, norms, kNormThreads, 0, /*overlap_previous=*/true, stream, p);
}

}  // namespace spamm::kernels::conv::sm90
