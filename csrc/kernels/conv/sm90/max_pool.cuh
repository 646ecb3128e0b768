// Max pooling by single pixels: a thread pools 16 bytes of channels of one output pixel, with all
// loads of a 2 x 2 window in flight. The values are torch's.
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

// The largest values of one window, for one chunk of channels. All loads of a 2 x 2 window are in
// flight at once.
//
// `image`: where its channels begin, null if none. `row`, `column`: of the output.
template <class Element>
__device__ __forceinline__ Chunk<Element> pool_window(const PixelPoolParams& p, int row, int column,
                                                      const Element* image) {
  constexpr int kInFlight = 4;
  const int first_row = row * p.stride.rows - p.padding.rows;
  const int first_column = column * p.stride.columns - p.padding.columns;
  auto best = lowest_chunk<Element>();
  int y = 0, x = 0;
#pragma unroll 1
  while (y < p.kernel.rows) {
    uint4 words[kInFlight];
    bool inside[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const int in_row = first_row + y * p.dilation.rows;
      const int in_column = first_column + x * p.dilation.columns;
      inside[i] = y < p.kernel.rows && static_cast<unsigned>(in_row) < p.in_size.rows &&
                  static_cast<unsigned>(in_column) < p.in_size.columns;
      const int64_t pixel = static_cast<int64_t>(in_row) * p.in_size.columns + in_column;
      words[i] = load_once(image + pixel * p.channels, inside[i] && image != nullptr);
      if (++x == p.kernel.columns) {
        x = 0;
        ++y;
      }
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      if (inside[i]) keep_largest(best, __builtin_bit_cast(Chunk<Element>, words[i]));
    }
  }
  return best;
}

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
  const Chunk<Element> best = pool_window(p, row, column, exists ? input : nullptr);
  if (!exists) return;
  auto* const output = static_cast<Element*>(p.output) + static_cast<int64_t>(pixel) * p.channels;
  *reinterpret_cast<Chunk<Element>*>(output + channel) = best;
}

template <class Element>
cudaError_t launch_pixel_pool(PixelPoolParams p, cudaStream_t stream) {
  const int64_t threads = int64_t{p.channels} / Chunk<Element>::kEntries * p.images *
                          p.out_size.rows * p.out_size.columns;
  return launch(pixel_pool<Element>, static_cast<unsigned>((threads - 1) / kPixelPoolThreads + 1),
                kPixelPoolThreads, 0,
                /*overlap_previous=*/true, stream, p);
}

}  // namespace spamm::kernels::conv::sm90
