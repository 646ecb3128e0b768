// Norms of an output's pixels, of 64 channels each, computed from a box in shared memory while it
// is stored: for readers whose pixel blocks lie in one image, and for those whose blocks hold one
// pixel of all images.
#pragma once

#include "kernels/common/numeric.cuh"
#include "kernels/conv/sm90/phases.cuh"
#include "kernels/conv/sm90/pipeline.cuh"

namespace spamm::kernels::conv::sm90 {

// The sum of the squares of four words of a staged line.
template <class Element>
__device__ __forceinline__ SquareSum<Element> squares_of(const uint4& words) {
  SquareSum<Element> sum = 0;
  const auto add = [&](Element x) {
    const SquareSum<Element> wide = widen(x);
    sum = fma(wide, wide, sum);
  };
  for (const uint32_t word : {words.x, words.y, words.z, words.w}) {
    if constexpr (sizeof(Element) == 4) {
      add(__builtin_bit_cast(Element, word));
    } else {
      add(__builtin_bit_cast(Element, static_cast<uint16_t>(word)));
      add(__builtin_bit_cast(Element, static_cast<uint16_t>(word >> 16)));
    }
  }
  return sum;
}

// The block with a thread's share of a pixel, and its first chunk there: two threads share a
// pixel's 64 channels, half a line of half types or a line of float32 each.
__device__ __forceinline__ const uint8_t* block_of_half(const OperandBlock& block, int) {
  return block.bytes;
}
__device__ __forceinline__ const uint8_t* block_of_half(const OperandBlock (&blocks)[2], int half) {
  return blocks[half].bytes;
}

// Stores the norm of a pixel of a box, if it exists.
__device__ __forceinline__ void store_pixel_norm(const ConvParams& p, int channel, const Box& box,
                                                 int pixel, float norm) {
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
__device__ __forceinline__ void store_norms_of_zeros(const ConvParams& p, int channel,
                                                     const Box& box) {
  const int pixel = threadIdx.x % 128;
  if (p.norm_pixels != nullptr && pixel < kBlock) store_pixel_norm(p, channel, box, pixel, 0);
}

// Stores the norms of a warpgroup's box of 64 pixels x 64 channels, which is staged in TMA's
// 128-byte swizzle. The caller has synchronised behind the staging, and does so before the next.
template <class Element, class Staged>
__device__ __forceinline__ void store_pixel_norms(const ConvParams& p, int channel, const Box& box,
                                                  const Staged& staged) {
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

// The same for boxes of several pixels that hold all images, half types: a norm is that of all
// images of a pixel (takes_norms_of_pixels).
template <class Element>
__device__ __forceinline__ void store_norms_of_pixels(const ConvParams& p, int channel,
                                                      const Box& box, const OperandBlock& staged) {
  if (p.norm_output == nullptr) return;
  // Neighbouring threads share a pixel, which has 8 chunks of each image. A thread adds up four.
  const int log2_pixels = p.box.columns + p.box.rows, log2_threads = 7 - log2_pixels;
  const int thread = threadIdx.x % 128, pixel = thread >> log2_threads;
  const int images = p.shape.output.images - box.image;
  SquareSum<Element> sum = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int number = (thread & ((1 << log2_threads) - 1)) * 4 + i, image = number / 8;
    const int line = image << log2_pixels | pixel, chunk = (number ^ line) % 8;
    const uint8_t* const from = staged.bytes + line * kLineBytes + chunk * 16;
    if (image < images) sum += squares_of<Element>(*reinterpret_cast<const uint4*>(from));
  }
  __syncwarp();
  for (int distance = 1 << log2_threads >> 1; distance > 0; distance /= 2) {
    sum += __shfl_xor_sync(~0u, sum, distance);
  }
  const Extent& output = p.shape.output;
  const int column = box.column + (pixel & ((1 << p.box.columns) - 1));
  const int row = box.row + (pixel >> p.box.columns);
  if ((thread & ((1 << log2_threads) - 1)) != 0 || images <= 0 || row >= output.rows ||
      column >= output.columns || channel >= p.shape.out_channels) {
    return;
  }
  const int groups = (p.shape.out_channels - 1) / kBlock + 1;
  const int64_t place = static_cast<int64_t>(row) * output.columns + column;
  p.norm_output[place * groups + channel / kBlock] = static_cast<float>(sqrt(sum));
}

}  // namespace spamm::kernels::conv::sm90
