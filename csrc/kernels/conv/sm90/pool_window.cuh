// The windows of a max pool: what the pools with norms of image blocks (max_pool.cuh) and pools by
// single pixels (deviation_pool.cuh) share.
#pragma once

#include <cstdint>
#include <type_traits>

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

}  // namespace spamm::kernels::conv::sm90
