// Norms of an output's pixels, of 64 channels each, computed from a box in shared memory while it
// is stored: for readers whose pixel blocks lie in one image.
#pragma once

#include "kernels/conv/sm90/epilogue.cuh"
#include "kernels/conv/sm90/norms.cuh"
#include "kernels/reference/sm90/phases.cuh"

namespace spamm::kernels::reference {

using namespace conv::sm90;
using conv::sm90::Tile;

// The block with a thread's share of a pixel, and its first chunk there: two threads share a
// pixel's 64 channels, half a line of half types or a line of float32 each.
__device__ __forceinline__ const uint8_t* block_of_half(const OperandBlock& block, int) {
  return block.bytes;
}
__device__ __forceinline__ const uint8_t* block_of_half(const OperandBlock (&blocks)[2], int half) {
  return blocks[half].bytes;
}

// Stores the norm of a pixel of a box, if it exists.
__device__ __forceinline__ void store_pixel_norm(const DeviationParams& p, int channel,
                                                 const Box& box, int pixel, float norm) {
  const Extent& output = p.shape.output;
  const int column = box.column + (pixel & ((1 << p.box.columns) - 1));
  const int row = box.row + (pixel >> p.box.columns & ((1 << p.box.rows) - 1));
  const int image = box.image + (pixel >> (p.box.columns + p.box.rows));
  if (image >= output.images || row >= output.rows || column >= output.columns ||
      channel >= p.shape.out_channels) {
    return;
  }
  p.norm_pixels[place_of_norm(p, image, row, column, channel)] = norm;
}

// Stores those of a box of zeros.
__device__ __forceinline__ void store_norms_of_zeros(const DeviationParams& p, int channel,
                                                     const Box& box) {
  const int pixel = threadIdx.x % 128;
  if (p.norm_pixels != nullptr && pixel < kBlock) store_pixel_norm(p, channel, box, pixel, 0);
}

// Stores the norms of a warpgroup's box of 64 pixels x 64 channels, which is staged in TMA's
// 128-byte swizzle. The caller has synchronised behind the staging, and does so before the next.
template <class Element, class Staged>
__device__ __forceinline__ void store_pixel_norms(const DeviationParams& p, int channel,
                                                  const Box& box, const Staged& staged) {
  if (p.norm_pixels == nullptr) return;
  constexpr int kChunks = sizeof(Element) == 4 ? 8 : 4;  // of a thread
  const int pixel = threadIdx.x % 128 / 2, half = threadIdx.x % 2;
  const uint8_t* line = block_of_half(staged, half) + pixel * kLineBytes;
  const int first = sizeof(Element) == 4 ? 0 : half * kChunks;
  SquareSum<Element> sum = 0;
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    const int chunk = (first + i) ^ pixel % 8;
    sum += squares_of<Element>(*reinterpret_cast<const uint4*>(line + chunk * 16));
  }
  sum += __shfl_xor_sync(~0u, sum, 1);
  if (half == 0) store_pixel_norm(p, channel, box, pixel, static_cast<float>(sqrt(sum)));
}

// The norm of 64 channels, of which neighbouring lanes hold a chunk each. All of them get it.
template <class Element>
__device__ __forceinline__ float norm_of_lanes(const Chunk<Element>& chunk) {
  SquareSum<Element> sum = 0;
#pragma unroll
  for (int e = 0; e < Chunk<Element>::kEntries; ++e) {
    const SquareSum<Element> wide = widen(chunk.entry(e));
    sum = fma(wide, wide, sum);
  }
#pragma unroll
  for (int distance = 1; distance < 64 / Chunk<Element>::kEntries; distance *= 2) {
    sum += __shfl_xor_sync(~0u, sum, distance);
  }
  return static_cast<float>(sqrt(sum));
}

}  // namespace spamm::kernels::reference
