// The windows of a max pool, which pools with norms of image blocks (max_pool.cuh) share with those
// by single pixels, below. The values are torch's.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/common/launch.cuh"
#include "kernels/common/overlap.cuh"
#include "kernels/conv/sm90/norms.cuh"

namespace spamm::kernels::conv::sm90 {

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
// `images`: where the channels of each image begin; null for one that does not exist.
// `row`, `column`: of the output.
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

// A thread pools one chunk of channels of an output pixel, and its neighbours the next chunks.
constexpr int kPixelPoolThreads = 256;

// The chunk of a thread in the output.
struct PixelPoolThread {
  uint32_t pixel;  // of all images
  int image, row, column, channel;
  bool exists;

  // `chunks`: threads of a pixel.
  __device__ __forceinline__ PixelPoolThread(const PixelPoolParams& p, int entries,
                                             uint32_t chunks) {
    // Numbers of threads are 32 bits wide: 64-bit divisions would take longer than the loads.
    const uint32_t number = blockIdx.x * kPixelPoolThreads + threadIdx.x;
    const uint32_t columns = p.out_size.columns, rows = p.out_size.rows;
    pixel = number / chunks;
    const uint32_t line = pixel / columns, in_order = line / rows;
    channel = static_cast<int>(number - pixel * chunks) * entries;
    column = static_cast<int>(pixel - line * columns);
    row = static_cast<int>(line - in_order * rows);
    image = static_cast<int>(in_order);
    exists = image < p.images && channel < p.channels;
  }
};

template <class Element>
__device__ __forceinline__ const Element* input_of(const PixelPoolParams& p,
                                                   const PixelPoolThread& thread) {
  const int64_t in_image = static_cast<int64_t>(p.in_size.rows) * p.in_size.columns * p.channels;
  return static_cast<const Element*>(p.input) + thread.image * in_image + thread.channel;
}

template <class Element>
__device__ __forceinline__ void store_pooled(const PixelPoolParams& p,
                                             const PixelPoolThread& thread,
                                             const Chunk<Element>& result) {
  if (!thread.exists) return;
  *reinterpret_cast<Chunk<Element>*>(static_cast<Element*>(p.output) +
                                     static_cast<int64_t>(thread.pixel) * p.channels +
                                     thread.channel) = result;
}

template <class Element>
__global__ void __launch_bounds__(kPixelPoolThreads, 4)
    pixel_pool(const __grid_constant__ PixelPoolParams p) {
  let_next_kernel_start();
  const PixelPoolThread thread(p, Chunk<Element>::kEntries, p.channels / Chunk<Element>::kEntries);
  const Element* const input = input_of<Element>(p, thread);
  wait_for_previous_kernel();
  const Element* const images[1] = {thread.exists ? input : nullptr};
  Chunk<Element> best[1];
  pool_window(p, p.channels, thread.row, thread.column, images, best);
  store_pooled(p, thread, best[0]);
}

// Blocks of threads for `chunks` threads of each output pixel.
inline unsigned pixel_pool_blocks(const PixelPoolParams& p, int64_t chunks) {
  const int64_t threads = chunks * p.images * p.out_size.rows * p.out_size.columns;
  return static_cast<unsigned>((threads - 1) / kPixelPoolThreads + 1);
}

template <class Element>
cudaError_t launch_pixel_pool(PixelPoolParams p, cudaStream_t stream) {
  return launch(pixel_pool<Element>, pixel_pool_blocks(p, p.channels / Chunk<Element>::kEntries),
                kPixelPoolThreads, 0, /*overlap_previous=*/true, stream, p);
}

}  // namespace spamm::kernels::conv::sm90
