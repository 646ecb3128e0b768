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
      if (i + u < count) visit(__builtin_bit_cast(Chunk<Element>, words[u]));
    }
  }
}

// Combines the values of neighbouring lanes in a fixed order. All of them get the result.
template <int kLog2Lanes, class Combine>
__device__ __forceinline__ float combine_lanes(float x, const Combine& combine) {
#pragma unroll
  for (int distance = 1; distance < 1 << kLog2Lanes; distance *= 2) {
    x = combine(x, __shfl_xor_sync(~0u, x, distance));
  }
  return x;
}

// The same for the values of all threads that share a norm: first the lanes, then the slices.
template <int kLog2Lanes, class Combine>
__device__ __forceinline__ float combine_slices(float x, float (&shared)[kNormThreads / 8],
                                                const Combine& combine) {
  constexpr int kLog2Norms = log2_norms(/*log2_held=*/-1, kLog2Lanes);
  const int number = threadIdx.x >> kLog2Lanes;  // slice by slice
  const int norm = number % (1 << kLog2Norms);
  x = combine_lanes<kLog2Lanes>(x, combine);
  __syncthreads();
  if (threadIdx.x % (1 << kLog2Lanes) == 0) shared[number] = x;
  __syncthreads();
  x = shared[norm];
#pragma unroll
  for (int s = 1; s < 1 << kLog2Slices; ++s) x = combine(x, shared[(s << kLog2Norms) + norm]);
  return x;
}

// The chunks of a norm whose images lie in slices. `visit_own(visit)` calls visit() for each chunk
// of the thread. It is called again if the entries must be scaled.
template <int kLog2Lanes, class VisitOwn>
struct SlicedChunks {
  const VisitOwn& visit_own;
  float (&shared)[kNormThreads / 8];

  // `of_slice(visit_chunks)` is the value of a slice's chunks.
  template <class OfSlice, class Combine>
  __device__ __forceinline__ float combined(const OfSlice& of_slice, const Combine& combine) const {
    return combine_slices<kLog2Lanes>(of_slice(visit_own), shared, combine);
  }

  // Tells whether it holds for a thread that takes part in the same calls.
  __device__ __forceinline__ bool any(bool x) const { return __syncthreads_or(x); }
};

// The same where a thread holds all images' chunks, each a slice. Those that do not exist are zero.
template <class Element, int kLog2Lanes, int kImages>
struct HeldChunks {
  const uint4 (&words)[kImages];

  template <class OfSlice, class Combine>
  __device__ __forceinline__ float combined(const OfSlice& of_slice, const Combine& combine) const {
    float x = 0;
#pragma unroll
    for (int i = 0; i < kImages; ++i) {
      const auto chunk = __builtin_bit_cast(Chunk<Element>, words[i]);
      const float y =
          combine_lanes<kLog2Lanes>(of_slice([&](const auto& visit) { visit(chunk); }), combine);
      x = i == 0 ? y : combine(x, y);
    }
    return x;
  }

  __device__ __forceinline__ bool any(bool x) const { return __any_sync(~0u, x); }
};

// The norm of SlicedChunks or HeldChunks.
template <class Element, class Chunks>
__device__ __forceinline__ float norm_of_chunks(const Chunks& chunks) {
  // Sums of squares of float16 never leave the safe range.
  constexpr bool kAlwaysSafe = std::is_same_v<Element, __half>;
  const auto add = [](float x, float y) { return x + y; };
  const auto visit_entries = [](const auto& visit_chunks, const auto& visit) {
    visit_chunks([&](const Chunk<Element>& chunk) {
#pragma unroll
      for (int e = 0; e < Chunk<Element>::kEntries; ++e) visit(widen(chunk.entry(e)));
    });
  };
  AnyNonzero<Element> any;
  const auto sum_of_squares = [&](const auto& visit_chunks) {
    float sums[4] = {};  // short chains
    visit_chunks([&](const Chunk<Element>& chunk) {
      if constexpr (!kAlwaysSafe) any.add(chunk);
#pragma unroll
      for (int e = 0; e < Chunk<Element>::kEntries; ++e) {
        const float x = widen(chunk.entry(e));
        sums[e % 4] = fmaf(x, x, sums[e % 4]);
      }
    });
    return (sums[0] + sums[1]) + (sums[2] + sums[3]);
  };
  float sum = chunks.combined(sum_of_squares, add);
  float result = sqrtf(sum);
  if constexpr (!kAlwaysSafe) {
    // The sum of zeros is right although it lies outside the safe range.
    const bool safe = is_safe(sum);
    if (chunks.any(any.found() && !safe)) {
      const auto largest_of = [&](const auto& visit_chunks) {
        float largest = 0;
        visit_entries(visit_chunks, [&](float x) { largest = larger_or_nan(fabsf(x), largest); });
        return largest;
      };
      const ScaledNorm<float> scaled(chunks.combined(largest_of, larger_or_nan));
      const auto scaled_sum = [&](const auto& visit_chunks) {
        float own = 0;
        visit_entries(visit_chunks, [&](float x) { own = scaled.add(own, x); });
        return own;
      };
      sum = chunks.combined(scaled_sum, add);
      if (!safe) result = scaled.norm(sum);
    }
  }
  return result;
}

// From an image to the next.
template <class Element>
__device__ __forceinline__ int64_t chunks_of_image(const PixelNormsJob& job) {
  return (static_cast<int64_t>(job.pixels) * job.channels) >> kLog2Entries<Element>;
}

template <class Element>
__device__ __forceinline__ const Chunk<Element>* chunk_at(const PixelNormsJob& job, int image,
                                                          int pixel, int channel) {
  return static_cast<const Chunk<Element>*>(job.data) + image * chunks_of_image<Element>(job) +
         ((static_cast<int64_t>(pixel) * job.channels + channel) >> kLog2Entries<Element>);
}

// Computes the norms of a thread block of a job, images in slices. Calls wait() before it reads.
template <class Element, int kLog2Lanes, class Wait>
__device__ __forceinline__ void sliced_norms(const PixelNormsJob& job, int number,
                                             const Wait& wait) {
  constexpr int kLog2Norms = log2_norms(/*log2_held=*/-1, kLog2Lanes);
  int image_block, line_block, pixel, group;
  job.by_line_blocks(image_block, line_block, number);
  const int lane = threadIdx.x % (1 << kLog2Lanes), in_block = threadIdx.x >> kLog2Lanes;
  const int slice = in_block >> kLog2Norms;
  const int in_images = (line_block << kLog2Norms) + in_block % (1 << kLog2Norms);
  job.by_groups(pixel, group, in_images);
  const int channel = ((group << kLog2Lanes) + lane) << kLog2Entries<Element>;
  const int first_image = (image_block << job.log2_images) + slice;
  const int end_image = min(job.images, (image_block + 1) << job.log2_images);
  const bool exists = pixel < job.pixels;
  const int count = exists && channel < job.channels  // of images, 2^kLog2Slices apart
                        ? (end_image - first_image + (1 << kLog2Slices) - 1) >> kLog2Slices
                        : 0;
  const int64_t norm_number =
      static_cast<int64_t>(image_block) * job.pixels * job.groups + in_images;
  const bool stores = exists && slice == 0 && lane == 0;
  const auto* first = chunk_at<Element>(job, first_image, pixel, channel);
  const int64_t step = chunks_of_image<Element>(job) << kLog2Slices;
  const auto visit_own = [&](const auto& visit) { for_each_chunk(first, step, count, visit); };
  __shared__ float shared[kNormThreads / 8];
  wait();
  const float norm =
      norm_of_chunks<Element>(SlicedChunks<kLog2Lanes, decltype(visit_own)>{visit_own, shared});
  if (stores) job.norms[norm_number] = norm;
}

// The same where a thread holds all images of a block. It takes a norm from each of several parts
// of the thread block's norms, with the loads of all of them in flight.
template <class Element, int kLog2Held, int kLog2Lanes, class Wait>
__device__ __forceinline__ void held_norms(const PixelNormsJob& job, int number, const Wait& wait) {
  constexpr int kImages = 1 << kLog2Held, kTurns = 1 << log2_turns(kLog2Held);
  constexpr int kNormsATurn = kNormThreads >> kLog2Lanes;
  int image_block, line_block;
  job.by_line_blocks(image_block, line_block, number);
  const int lane = threadIdx.x % (1 << kLog2Lanes);
  const int own_norm = line_block * (kTurns * kNormsATurn) + (threadIdx.x >> kLog2Lanes);
  const int first_image = image_block << job.log2_images;
  const int images = min(job.images - first_image, min(kImages, 1 << job.log2_images));
  const Chunk<Element>* first[kTurns];  // null if it does not exist
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    int pixel, group;
    job.by_groups(pixel, group, own_norm + turn * kNormsATurn);
    const int channel = ((group << kLog2Lanes) + lane) << kLog2Entries<Element>;
    const bool exists = pixel < job.pixels && channel < job.channels;
    first[turn] = exists ? chunk_at<Element>(job, first_image, pixel, channel) : nullptr;
  }
  const int64_t step = chunks_of_image<Element>(job);
  uint4 words[kTurns][kImages];
  wait();
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
#pragma unroll
    for (int i = 0; i < kImages; ++i) {
      words[turn][i] = load_once(first[turn] + i * step, first[turn] != nullptr && i < images);
    }
  }
  const int norms = job.pixels * job.groups;
  float* const stored = job.norms + static_cast<int64_t>(image_block) * norms;
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    const float norm =
        norm_of_chunks<Element>(HeldChunks<Element, kLog2Lanes, kImages>{words[turn]});
    const int number_in_images = own_norm + turn * kNormsATurn;
    if (lane == 0 && number_in_images < norms) stored[number_in_images] = norm;
  }
}

template <class Element, int kLog2Held, int kLog2Lanes>
__global__ void __launch_bounds__(kNormThreads)
    pixel_norms(const __grid_constant__ PixelNormsParams p) {
  let_next_kernel_start();
  const auto wait = [&] {
    wait_for_previous_kernel();
    if (p.zeroed != nullptr && blockIdx.x == 0 && threadIdx.x == 0) *p.zeroed = 0;
  };
  const int number = blockIdx.x - p.jobs[0].thread_blocks;
  if (number >= 0) {
    sliced_norms<Element, kLog2Lanes>(p.jobs[1], number, wait);
  } else if constexpr (kLog2Held < 0) {
    sliced_norms<Element, kLog2Lanes>(p.jobs[0], blockIdx.x, wait);
  } else {
    held_norms<Element, kLog2Held, kLog2Lanes>(p.jobs[0], blockIdx.x, wait);
  }
}

template <class Element>
cudaError_t launch_pixel_norms(PixelNormsParams p, cudaStream_t stream) {
  const int blocks = p.jobs[0].thread_blocks + p.jobs[1].thread_blocks;
  using Kernel = void (*)(PixelNormsParams);
  constexpr int kLog2Lanes = 6 - kLog2Entries<Element>;  // for 64 channels
  static constexpr Kernel kKernels[2][5] = {
      {pixel_norms<Element, -1, kLog2Lanes>, pixel_norms<Element, 0, kLog2Lanes>,
       pixel_norms<Element, 1, kLog2Lanes>, pixel_norms<Element, 2, kLog2Lanes>,
       pixel_norms<Element, 3, kLog2Lanes>},
      {pixel_norms<Element, -1, kLog2Lanes + 1>, pixel_norms<Element, 0, kLog2Lanes + 1>,
       pixel_norms<Element, 1, kLog2Lanes + 1>, pixel_norms<Element, 2, kLog2Lanes + 1>,
       pixel_norms<Element, 3, kLog2Lanes + 1>}};
  const bool wide = p.jobs[1].log2_group == 7 || p.jobs[0].log2_group == 7;
  const Kernel kernel = kKernels[wide][p.jobs[0].log2_held + 1];
  return launch(kernel, blocks, kNormThreads, 0, /*overlap_previous=*/true, stream, p);
}

}  // namespace spamm::kernels::conv::sm90
