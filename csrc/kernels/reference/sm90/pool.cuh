// Max pooling of deviations from a reference by single pixels: max(input + reference) -
// max(reference), with the norms of the output's pixels. Where the whole window of the input is
// zero, so is the result, and the reference is not read. Lanes that share a norm are neighbours.
// With norms of the input, windows of 2 x 2 pixels that are zero are not read.
#pragma once

#include "kernels/conv/sm90/pool_window.cuh"
#include "kernels/reference/params.h"
#include "kernels/reference/sm90/pixel_norms.cuh"

namespace spamm::kernels::reference {

// The larger one, or NaN if one is.
__device__ __forceinline__ float larger(float best, float x) {
  return x > best || x != x ? x : best;
}

// A thread's window: calls visit(offset in the image, in entries) for each pixel that exists.
template <class Visit>
__device__ __forceinline__ void for_each_pixel(const DeviationPoolParams& p, int row, int column,
                                               const Visit& visit) {
#pragma unroll 1
  for (int y = 0; y < p.kernel.rows; ++y) {
    const int in_row = row * p.stride.rows - p.padding.rows + y * p.dilation.rows;
    if (static_cast<unsigned>(in_row) >= p.in_size.rows) continue;
#pragma unroll 2
    for (int x = 0; x < p.kernel.columns; ++x) {
      const int in_column = column * p.stride.columns - p.padding.columns + x * p.dilation.columns;
      if (static_cast<unsigned>(in_column) >= p.in_size.columns) continue;
      visit((static_cast<int64_t>(in_row) * p.in_size.columns + in_column) * p.channels);
    }
  }
}

// The larger ones of a pixel's values and of its reference's.
template <class Element>
struct LargestOfBoth {
  static constexpr int kEntries = Chunk<Element>::kEntries;
  float of_both[kEntries], of_reference[kEntries];

  __device__ LargestOfBoth() {
#pragma unroll
    for (int e = 0; e < kEntries; ++e) of_both[e] = of_reference[e] = -INFINITY;
  }

  __device__ __forceinline__ void add(const Chunk<Element>& x, const Chunk<Element>& m) {
#pragma unroll
    for (int e = 0; e < kEntries; ++e) {
      of_both[e] = larger(of_both[e], widen(x.entry(e)) + widen(m.entry(e)));
      of_reference[e] = larger(of_reference[e], widen(m.entry(e)));
    }
  }

  __device__ __forceinline__ Chunk<Element> difference() const {
    Chunk<Element> result{};
#pragma unroll
    for (int e = 0; e < kEntries; ++e) {
      result.set(e, narrow<Element>(of_both[e] - of_reference[e]));
    }
    return result;
  }
};

// The deviation of one chunk for a window of 2 x 2 pixels that all exist. The loads of the input
// are in flight together, and then those of the reference.
template <class Element>
__device__ __forceinline__ Chunk<Element> pool_four_deviations(const DeviationPoolParams& p,
                                                               const Element* input,
                                                               const Element* reference) {
  const int64_t line = static_cast<int64_t>(p.in_size.columns) * p.channels;
  const int64_t places[4] = {0, p.channels, line, line + p.channels};
  uint4 words[4], of_reference[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) words[i] = load_once(input + places[i], true);
  AnyNonzero<Element> any;
#pragma unroll
  for (const uint4& word : words) any.add(__builtin_bit_cast(Chunk<Element>, word));
  if (!any.found()) return {};
#pragma unroll
  for (int i = 0; i < 4; ++i) of_reference[i] = load_once(reference + places[i], true);
  LargestOfBoth<Element> largest;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    largest.add(__builtin_bit_cast(Chunk<Element>, words[i]),
                __builtin_bit_cast(Chunk<Element>, of_reference[i]));
  }
  return largest.difference();
}

// Whether the windows are 2 x 2 pixels, side by side. Those of the output's pixels then exist.
__device__ __forceinline__ bool pools_four(const DeviationPoolParams& p) {
  const auto both_are = [](const Size2& size, int value) {
    return size.rows == value && size.columns == value;
  };
  return both_are(p.kernel, 2) && both_are(p.stride, 2) && both_are(p.padding, 0) &&
         both_are(p.dilation, 1) && 2 * p.out_size.rows <= p.in_size.rows &&
         2 * p.out_size.columns <= p.in_size.columns;
}

// Whether the norms tell that a window of 2 x 2 pixels that all exist is zero.
__device__ __forceinline__ bool norms_are_zero(const DeviationPoolParams& p,
                                               const PixelPoolThread& thread) {
  if (p.norm_input == nullptr) return false;
  float norms[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = 2 * thread.row + i / 2, column = 2 * thread.column + i % 2;
    const int64_t line = static_cast<int64_t>(thread.image) * p.in_size.rows + row;
    const int64_t place =
        line * (p.in_size.columns >> p.log2_norm_columns) + (column >> p.log2_norm_columns);
    const int among = column & ((1 << p.log2_norm_columns) - 1);
    norms[i] = p.norm_input[place * p.norm_groups + (among * p.channels + thread.channel) / 64];
  }
  return norms[0] == 0 && norms[1] == 0 && norms[2] == 0 && norms[3] == 0;
}

// The deviation of one chunk, zero where the window is.
template <class Element>
__device__ __forceinline__ Chunk<Element> pool_deviations(const DeviationPoolParams& p,
                                                          const PixelPoolThread& thread,
                                                          const Element* input) {
  const auto* reference = static_cast<const Element*>(p.reference) + thread.channel;
  if (!thread.exists) return {};
  if (pools_four(p)) {
    if (norms_are_zero(p, thread)) return {};
    const int64_t first =
        (static_cast<int64_t>(thread.row) * 2 * p.in_size.columns + thread.column * 2) * p.channels;
    return pool_four_deviations(p, input + first, reference + first);
  }
  const auto chunk_at = [](const Element* data) {
    return __builtin_bit_cast(Chunk<Element>, load_once(data, true));
  };
  AnyNonzero<Element> any;
  for_each_pixel(p, thread.row, thread.column, [&](int64_t at) { any.add(chunk_at(input + at)); });
  if (!any.found()) return {};
  LargestOfBoth<Element> largest;
  for_each_pixel(p, thread.row, thread.column,
                 [&](int64_t at) { largest.add(chunk_at(input + at), chunk_at(reference + at)); });
  return largest.difference();
}

template <class Element>
__global__ void __launch_bounds__(kPixelPoolThreads, 4)
    deviation_pool(const __grid_constant__ DeviationPoolParams p) {
  constexpr int kEntries = Chunk<Element>::kEntries, kLanes = 64 / kEntries;
  let_next_kernel_start();
  // Lanes that share a norm are there also beyond the channels.
  const PixelPoolThread thread(p, kEntries, p.groups * kLanes);
  const Element* const input = input_of<Element>(p, thread);
  wait_for_previous_kernel();
  const Chunk<Element> result = pool_deviations(p, thread, input);
  const float norm = norm_of_lanes(result);
  if (thread.exists && threadIdx.x % kLanes == 0) {
    p.norms[static_cast<int64_t>(thread.pixel) * p.groups + thread.channel / 64] = norm;
  }
  store_pooled(p, thread, result);
}

template <class Element>
cudaError_t launch_deviation_pool(DeviationPoolParams p, cudaStream_t stream) {
  const int64_t chunks = int64_t{p.groups} * (64 / Chunk<Element>::kEntries);
  return launch(deviation_pool<Element>, pixel_pool_blocks(p, chunks), kPixelPoolThreads, 0,
                /*overlap_previous=*/true, stream, p);
}

}  // namespace spamm::kernels::reference
