// Norms of a convolution's operands, computed from channels-last tensors without an im2col matrix.
//
// The kernel computes the norm of every (block of images, pixel, channel group). The weight is such
// a tensor too: its output channels count as images, its kernel positions as pixels. If a pixel
// block is one pixel of several images, these are the norms of the im2col blocks, shifted by the
// kernel position. Otherwise block_norms.cuh combines them.
#pragma once

#include <cstdint>

#include "kernels/common/launch.cuh"
#include "kernels/common/numeric.cuh"
#include "kernels/common/overlap.cuh"
#include "kernels/conv/sm90/params.h"
#include "kernels/norm_map/chunk.cuh"

namespace spamm::kernels::conv::sm90 {

template <class Element>
constexpr int kLog2Entries = sizeof(Element) == 4 ? 2 : 3;  // of a chunk

__device__ inline float larger_or_nan(float x, float y) { return x > y || x != x ? x : y; }

// Loads one chunk, or zeros if it does not exist. No other thread reads it, so it is not kept in
// L1. Volatile, so that the compiler issues all loads before it uses the first. Not ld.global.nc,
// because a kernel that still runs when this one starts may write the data (overlap.cuh).
__device__ __forceinline__ uint4 load_once(const void* data, bool exists) {
  uint4 words{};
  asm volatile(
      "{\n.reg .pred exists;\nsetp.ne.b32 exists, %5, 0;\n"
      "@exists ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
      : "+r"(words.x), "+r"(words.y), "+r"(words.z), "+r"(words.w)
      : "l"(data), "r"(static_cast<int>(exists)));
  return words;
}

// Visits a thread's chunks, image by image, with several loads in flight.
template <class Element, class Visit>
__device__ __forceinline__ void for_each_chunk(const Chunk<Element>* first, int64_t step, int count,
                                               const Visit& visit) {
  constexpr int kUnroll = 8;
  for (int i = 0; i < count; i += kUnroll) {
    uint4 words[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      words[u] = load_once(first + (i + u) * step, i + u < count);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      visit(__builtin_bit_cast(Chunk<Element>, words[u]));
    }
  }
}

// Combines the values of the threads that share a norm in a fixed order: first neighbouring lanes,
// then the slices. All of them get the result.
template <int kLog2Slices, int kLog2Lanes, class Combine>
__device__ __forceinline__ float combine_norm(float x, float (&shared)[kNormThreads / 8],
                                              const Combine& combine) {
#pragma unroll
  for (int distance = 1; distance < 1 << kLog2Lanes; distance *= 2) {
    x = combine(x, __shfl_xor_sync(~0u, x, distance));
  }
  if constexpr (kLog2Slices > 0) {
    constexpr int kLog2Norms = log2_norms(kLog2Slices, kLog2Lanes);
    const int number = threadIdx.x >> kLog2Lanes;  // slice by slice
    __syncthreads();
    if (threadIdx.x % (1 << kLog2Lanes) == 0) shared[number] = x;
    __syncthreads();
    const int norm = number % (1 << kLog2Norms);
    x = shared[norm];
#pragma unroll
    for (int s = 1; s < 1 << kLog2Slices; ++s) x = combine(x, shared[(s << kLog2Norms) + norm]);
  }
  return x;
}

// The norm, pixel, channels and images of a thread.
template <int kLog2Slices, int kLog2Lanes, int kLog2Entries>
struct NormThread {
  int64_t norm;  // in job.norms
  int pixel, channel, first_image;
  int count;  // of images, 2^kLog2Slices apart; 0 beyond the pixels or channels
  bool stores;

  __device__ __forceinline__ NormThread(const PixelNormsJob& job, int number) {
    constexpr int kLog2Norms = log2_norms(kLog2Slices, kLog2Lanes);
    int image_block, line_block;
    job.by_line_blocks(image_block, line_block, number);
    const int lane = threadIdx.x % (1 << kLog2Lanes), in_block = threadIdx.x >> kLog2Lanes;
    const int slice = in_block >> kLog2Norms;
    const int in_images = (line_block << kLog2Norms) + in_block % (1 << kLog2Norms);
    int group;
    job.by_groups(pixel, group, in_images);
    channel = ((group << kLog2Lanes) + lane) << kLog2Entries;
    first_image = (image_block << job.log2_images) + slice;
    const int end_image = min(job.images, (image_block + 1) << job.log2_images);
    const bool exists = pixel < job.pixels;
    count = exists && channel < job.channels
                ? (end_image - first_image + (1 << kLog2Slices) - 1) >> kLog2Slices
                : 0;
    norm = static_cast<int64_t>(image_block) * job.pixels * job.groups + in_images;
    stores = exists && slice == 0 && lane == 0;
  }
};

// The norm of all chunks of the threads that share it. `visit_all(visit)` calls visit() for each
// chunk of the thread; it is called a second time if the entries must be scaled.
template <class Element, int kLog2Slices, int kLog2Lanes, class VisitAll>
__device__ __forceinline__ float norm_of_chunks(const VisitAll& visit_all) {
  // Sums of squares of float16 never leave the safe range.
  constexpr bool kAlwaysSafe = std::is_same_v<Element, __half>;
  __shared__ float shared[kNormThreads / 8];
  const auto add = [](float x, float y) { return x + y; };
  const auto visit_entries = [&](const auto& visit) {
    visit_all([&](const Chunk<Element>& chunk) {
#pragma unroll
      for (int e = 0; e < Chunk<Element>::kEntries; ++e) visit(widen(chunk.entry(e)));
    });
  };
  float sums[4] = {};  // short chains
  AnyNonzero<Element> any;
  visit_all([&](const Chunk<Element>& chunk) {
    if constexpr (!kAlwaysSafe) any.add(chunk);
#pragma unroll
    for (int e = 0; e < Chunk<Element>::kEntries; ++e) {
      const float x = widen(chunk.entry(e));
      sums[e % 4] = fmaf(x, x, sums[e % 4]);
    }
  });
  float own = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  float sum = combine_norm<kLog2Slices, kLog2Lanes>(own, shared, add);
  float result = sqrtf(sum);
  if constexpr (!kAlwaysSafe) {
    // The sum of zeros is right although it lies outside the safe range.
    const bool safe = is_safe(sum);
    if (__syncthreads_or(any.found() && !safe)) {
      float largest = 0;
      visit_entries([&](float x) { largest = larger_or_nan(fabsf(x), largest); });
      largest = combine_norm<kLog2Slices, kLog2Lanes>(largest, shared, larger_or_nan);
      const ScaledNorm<float> scaled(largest);
      own = 0;
      visit_entries([&](float x) { own = scaled.add(own, x); });
      sum = combine_norm<kLog2Slices, kLog2Lanes>(own, shared, add);
      if (!safe) result = scaled.norm(sum);
    }
  }
  return result;
}

// Computes the norms of one thread block of a job. Calls wait() before it reads.
template <class Element, int kLog2Slices, int kLog2Lanes, class Wait>
__device__ __forceinline__ void pixel_norms(const PixelNormsJob& job, int number,
                                            const Wait& wait) {
  const NormThread<kLog2Slices, kLog2Lanes, kLog2Entries<Element>> thread(job, number);
  constexpr int kEntries = 1 << kLog2Entries<Element>;
  const int64_t image_stride = static_cast<int64_t>(job.pixels) * job.channels / kEntries;
  const auto* first =
      static_cast<const Chunk<Element>*>(job.data) + thread.first_image * image_stride +
      (static_cast<int64_t>(thread.pixel) * job.channels + thread.channel) / kEntries;
  wait();
  const float norm = norm_of_chunks<Element, kLog2Slices, kLog2Lanes>([&](const auto& visit) {
    for_each_chunk(first, image_stride << kLog2Slices, thread.count, visit);
  });
  if (thread.stores) job.norms[thread.norm] = norm;
}

// The blocks of the second job have 32 images or more, hence 2^3 slices.
template <class Element, int kLog2Slices, int kLog2Lanes>
__global__ void __launch_bounds__(kNormThreads)
    pixel_norms(const __grid_constant__ PixelNormsParams p) {
  let_next_kernel_start();
  const auto wait = [&] {
    wait_for_previous_kernel();
    if (p.zeroed != nullptr && blockIdx.x == 0 && threadIdx.x == 0) *p.zeroed = 0;
  };
  const int number = blockIdx.x - p.jobs[0].thread_blocks;
  if (number < 0) {
    pixel_norms<Element, kLog2Slices, kLog2Lanes>(p.jobs[0], blockIdx.x, wait);
  } else {
    pixel_norms<Element, 3, kLog2Lanes>(p.jobs[1], number, wait);
  }
}

template <class Element>
cudaError_t launch_pixel_norms(const PixelNormsParams& p, cudaStream_t stream) {
  const int blocks = p.jobs[0].thread_blocks + p.jobs[1].thread_blocks;
  using Kernel = void (*)(PixelNormsParams);
  constexpr int kLog2Lanes = 6 - kLog2Entries<Element>;  // for 64 channels
  static constexpr Kernel kKernels[2][4] = {
      {pixel_norms<Element, 0, kLog2Lanes>, pixel_norms<Element, 1, kLog2Lanes>,
       pixel_norms<Element, 2, kLog2Lanes>, pixel_norms<Element, 3, kLog2Lanes>},
      {pixel_norms<Element, 0, kLog2Lanes + 1>, pixel_norms<Element, 1, kLog2Lanes + 1>,
       pixel_norms<Element, 2, kLog2Lanes + 1>, pixel_norms<Element, 3, kLog2Lanes + 1>}};
  const PixelNormsJob& job = p.jobs[0];
  const Kernel kernel =
      kKernels[p.jobs[1].log2_group == 7 || job.log2_group == 7][log2_slices(job.log2_images)];
  return launch(kernel, blocks, kNormThreads, 0, /*overlap_previous=*/true, stream, p);
}

}  // namespace spamm::kernels::conv::sm90
