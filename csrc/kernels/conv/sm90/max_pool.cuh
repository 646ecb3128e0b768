// Max pooling with output norms, and by single pixels without.
//
// A thread block computes one norm: an output pixel, 64 images, 64 channels. A thread pools 8
// channels of two images, with all loads of a 2 x 2 window in flight. The norm pass (norms.cuh)
// sums the squares of 8 images in four chains of a thread. Here four threads have two images each,
// so they exchange entries, and each sums one chain in the order of that pass: the same bits.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/common/launch.cuh"
#include "kernels/common/overlap.cuh"
#include "kernels/conv/sm90/norms.cuh"

namespace spamm::kernels::conv::sm90 {

// ---- Windows -----------------------------------------------------------------------------------

// Both share the windows. The values are torch's.

// Per entry, like torch: keeps the first of equal values, and NaN if there is one.
template <class Element>
__device__ __forceinline__ void keep_largest(Chunk<Element>& best, const Chunk<Element>& chunk) {
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    uint32_t& old = best.words[w];
    const uint32_t word = chunk.words[w];
    if constexpr (sizeof(Element) == 4) {
      const float x = __uint_as_float(word);
      if (x > __uint_as_float(old) || x != x) old = word;
    } else {
      using Pair = std::conditional_t<std::is_same_v<Element, __half>, __half2, __nv_bfloat162>;
      const Pair x = reinterpret_cast<const Pair&>(word), y = reinterpret_cast<const Pair&>(old);
      const uint32_t replaced = __hgt2_mask(x, y) | __hneu2_mask(x, x);
      old = (word & replaced) | (old & ~replaced);
    }
  }
}

// A chunk of -infinity.
template <class Element>
__device__ __forceinline__ Chunk<Element> lowest_chunk() {
  Chunk<Element> chunk{};
#pragma unroll
  for (int e = 0; e < Chunk<Element>::kEntries; ++e) chunk.set(e, narrow<Element>(-INFINITY));
  return chunk;
}

// The largest values of one window in several images, for one chunk of channels. All loads of a
// 2 x 2 window are in flight at once.
//
// `images`: where each image's channels begin, null if none. `row`, `column`: of the output.
template <class Element, int kImages, class Params>
__device__ __forceinline__ void pool_window(const Params& p, int channels, int row, int column,
                                            const Element* const (&images)[kImages],
                                            Chunk<Element> (&best)[kImages]) {
  constexpr int kInFlight = 4;
  const int first_row = row * p.stride.rows - p.padding.rows;
  const int first_column = column * p.stride.columns - p.padding.columns;
#pragma unroll
  for (auto& chunk : best) chunk = lowest_chunk<Element>();
  int y = 0, x = 0;
#pragma unroll 1
  while (y < p.kernel.rows) {
    uint4 words[kInFlight][kImages];
    bool inside[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const int in_row = first_row + y * p.dilation.rows;
      const int in_column = first_column + x * p.dilation.columns;
      inside[i] = y < p.kernel.rows && static_cast<unsigned>(in_row) < p.in_size.rows &&
                  static_cast<unsigned>(in_column) < p.in_size.columns;
      const int64_t pixel = static_cast<int64_t>(in_row) * p.in_size.columns + in_column;
#pragma unroll
      for (int u = 0; u < kImages; ++u) {
        words[i][u] = load_once(images[u] + pixel * channels, inside[i] && images[u] != nullptr);
      }
      if (++x == p.kernel.columns) {
        x = 0;
        ++y;
      }
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      if (!inside[i]) continue;
#pragma unroll
      for (int u = 0; u < kImages; ++u) {
        keep_largest(best[u], __builtin_bit_cast(Chunk<Element>, words[i][u]));
      }
    }
  }
}

// ---- Max pooling by single pixels ---------------------------------------------------------------

constexpr int kPixelPoolThreads = 256;

// A thread pools one chunk of channels of an output pixel, and its neighbours the next chunks.
template <class Element>
__global__ void __launch_bounds__(kPixelPoolThreads, 4)
    pixel_pool(const __grid_constant__ PixelPoolParams p) {
  let_next_kernel_start();
  // Numbers of threads are 32 bits wide: 64-bit divisions would take longer than the loads.
  const uint32_t number = blockIdx.x * kPixelPoolThreads + threadIdx.x;
  const uint32_t chunks = p.channels / Chunk<Element>::kEntries;
  const uint32_t columns = p.out_size.columns, rows = p.out_size.rows;
  const uint32_t pixel = number / chunks, line = pixel / columns, in_order = line / rows;
  const int channel = static_cast<int>(number - pixel * chunks) * Chunk<Element>::kEntries;
  const int column = static_cast<int>(pixel - line * columns);
  const int row = static_cast<int>(line - in_order * rows), image = static_cast<int>(in_order);
  const bool exists = image < p.images && channel < p.channels;
  const int64_t in_image = static_cast<int64_t>(p.in_size.rows) * p.in_size.columns * p.channels;
  const auto* const input = static_cast<const Element*>(p.input) + image * in_image + channel;
  wait_for_previous_kernel();
  const Element* const images[1] = {exists ? input : nullptr};
  Chunk<Element> best[1];
  pool_window(p, p.channels, row, column, images, best);
  if (!exists) return;
  auto* const output = static_cast<Element*>(p.output) + static_cast<int64_t>(pixel) * p.channels;
  *reinterpret_cast<Chunk<Element>*>(output + channel) = best[0];
}

template <class Element>
cudaError_t launch_pixel_pool(PixelPoolParams p, cudaStream_t stream) {
  const int64_t threads = int64_t{p.channels} / Chunk<Element>::kEntries * p.images *
                          p.out_size.rows * p.out_size.columns;
  return launch(pixel_pool<Element>, static_cast<unsigned>((threads - 1) / kPixelPoolThreads + 1),
                kPixelPoolThreads, 0,
                /*overlap_previous=*/true, stream, p);
}

// As in the norm pass, but lanes that have neighbouring norms there share one norm here.
constexpr int kLog2PoolLanes = 3, kPoolParts = 1 << log2_norms(/*log2_held=*/-1, kLog2PoolLanes);
constexpr int kImagesAPart = (64 >> kLog2Slices) / kPoolParts;
static_assert(kPoolParts << kLog2PoolLanes == 32, "a warp is a slice");

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
// one word. Threads that differ in their part alone exchange words: a 4 x 4 transposition.
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
  const int norm_number = blockIdx.x, line = norm_number / p.job.groups;
  const int image_block = line / p.job.pixels, pixel = line - image_block * p.job.pixels;
  const int lane = threadIdx.x % (1 << kLog2PoolLanes), row = pixel / p.out_size.columns;
  const int column = pixel - row * p.out_size.columns;
  const int channel = (norm_number - line * p.job.groups) * 64 + lane * 8;
  const int slice = threadIdx.x / 32, part = threadIdx.x % 32 >> kLog2PoolLanes;
  const int first_image = image_block * 64;
  const int end_image =
      channel < p.job.channels ? min(p.job.images, first_image + 64) : first_image;
  // The thread's own image `u`, in the order of the norm pass.
  const auto image_of = [&](int u) {
    return first_image + (part * kImagesAPart + u << kLog2Slices) + slice;
  };
  const int64_t in_image =
      static_cast<int64_t>(p.in_size.rows) * p.in_size.columns * p.job.channels;
  const auto* input = static_cast<const Element*>(p.input) + channel;
  const Element* images[kImagesAPart];
#pragma unroll
  for (int u = 0; u < kImagesAPart; ++u) {
    const int image = image_of(u);
    images[u] = image < end_image ? input + image * in_image : nullptr;
  }
  wait_for_previous_kernel();
  Chunk<Element> best[kImagesAPart];
  pool_window(p, p.job.channels, row, column, images, best);
  auto* output = static_cast<Element*>(p.output) + channel;
#pragma unroll
  for (int u = 0; u < kImagesAPart; ++u) {
    if (images[u] != nullptr) {
      const int64_t pixel_of_all =
          (static_cast<int64_t>(image_of(u)) * p.out_size.rows + row) * p.out_size.columns + column;
      *reinterpret_cast<Chunk<Element>*>(output + pixel_of_all * p.job.channels) = best[u];
    } else {
      best[u] = {};
    }
  }
  const float norm = norm_of_pooled(best);
  if (threadIdx.x == 0) p.job.norms[norm_number] = norm;
}

template <class Element>
cudaError_t launch_max_pool(MaxPoolParams p, cudaStream_t stream) {
  const int norms = ceil_div(p.job.images, 64) * p.job.pixels * p.job.groups;
  return launch(max_pool<Element>, norms, kNormThreads, 0, /*overlap_previous=*/true, stream, p);
}

}  // namespace spamm::kernels::conv::sm90
