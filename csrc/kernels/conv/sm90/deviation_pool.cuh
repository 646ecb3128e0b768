// Max pooling of deviations from a reference: max(input + reference) - max(reference), with the
// norms of the output's pixels.
//
// A thread pools one chunk of channels of an output pixel. Where the whole window of the input is
// zero, so is the result, and the reference is not read. Lanes that share a norm are neighbours.
#pragma once

#include <cstdint>

#include "kernels/common/launch.cuh"
#include "kernels/common/overlap.cuh"
#include "kernels/conv/sm90/norms.cuh"
#include "kernels/conv/sm90/pipeline.cuh"

namespace spamm::kernels::conv::sm90 {

constexpr int kDeviationPoolThreads = 256;

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

template <class Element>
__global__ void __launch_bounds__(kDeviationPoolThreads, 4)
    deviation_pool(const __grid_constant__ DeviationPoolParams p) {
  constexpr int kEntries = Chunk<Element>::kEntries, kLanes = 64 / kEntries;
  let_next_kernel_start();
  const int64_t number =
      static_cast<int64_t>(blockIdx.x) * (kDeviationPoolThreads / kLanes) + threadIdx.x / kLanes;
  const int64_t pixel = number / p.groups;
  const int channel =
      static_cast<int>(number - pixel * p.groups) * 64 + threadIdx.x % kLanes * kEntries;
  const int64_t line = pixel / p.out_size.columns, image = line / p.out_size.rows;
  const int column = static_cast<int>(pixel - line * p.out_size.columns);
  const int row = static_cast<int>(line - image * p.out_size.rows);
  const bool exists = image < p.images && channel < p.channels;
  wait_for_previous_kernel();

  const int64_t in_image = static_cast<int64_t>(p.in_size.rows) * p.in_size.columns * p.channels;
  const Element* input = static_cast<const Element*>(p.input) + image * in_image + channel;
  const Element* reference = static_cast<const Element*>(p.reference) + channel;
  const auto chunk_at = [](const Element* data) {
    return __builtin_bit_cast(Chunk<Element>, load_once(data, true));
  };
  AnyNonzero<Element> any;
  if (exists) {
    for_each_pixel(p, row, column, [&](int64_t at) { any.add(chunk_at(input + at)); });
  }
  Chunk<Element> result{};
  SquareSum<Element> sum = 0;
  if (any.found()) {
    float of_both[kEntries], of_reference[kEntries];
#pragma unroll
    for (int e = 0; e < kEntries; ++e) of_both[e] = of_reference[e] = -INFINITY;
    for_each_pixel(p, row, column, [&](int64_t at) {
      const Chunk<Element> x = chunk_at(input + at), m = chunk_at(reference + at);
#pragma unroll
      for (int e = 0; e < kEntries; ++e) {
        of_both[e] = larger(of_both[e], widen(x.entry(e)) + widen(m.entry(e)));
        of_reference[e] = larger(of_reference[e], widen(m.entry(e)));
      }
    });
#pragma unroll
    for (int e = 0; e < kEntries; ++e) {
      const Element rounded = narrow<Element>(of_both[e] - of_reference[e]);
      result.set(e, rounded);
      const SquareSum<Element> wide = widen(rounded);
      sum = fma(wide, wide, sum);
    }
  }
#pragma unroll
  for (int distance = 1; distance < kLanes; distance *= 2) {
    sum += __shfl_xor_sync(~0u, sum, distance);
  }
  if (!exists) return;
  *reinterpret_cast<Chunk<Element>*>(static_cast<Element*>(p.output) + pixel * p.channels +
                                     channel) = result;
  if (threadIdx.x % kLanes == 0) p.norms[number] = static_cast<float>(sqrt(sum));
}

template <class Element>
cudaError_t launch_deviation_pool(const DeviationPoolParams& p, cudaStream_t stream) {
  constexpr int kNorms = kDeviationPoolThreads / (64 / Chunk<Element>::kEntries);  // of a block
  const int64_t norms =
      static_cast<int64_t>(p.images) * p.out_size.rows * p.out_size.columns * p.groups;
  return launch(deviation_pool<Element>, static_cast<unsigned>((norms - 1) / kNorms + 1),
                kDeviationPoolThreads, 0, /*overlap_previous=*/true, stream, p);
}

}  // namespace spamm::kernels::conv::sm90
