// How the convolution of deviations stores its output: in phases, and with norms of its pixels, of
// 64 channels each, computed from a box in shared memory, for readers whose pixel blocks lie in one
// image.
#pragma once

#include <cuda.h>

#include "kernels/common/tensor_map_sm90.h"
#include "kernels/common/wgmma_sm90.cuh"
#include "kernels/conv/sm90/epilogue.cuh"
#include "kernels/conv/sm90/norms.cuh"
#include "kernels/reference/params.h"

namespace spamm::kernels::reference {

// The output of a convolution in phases, put in its places: channels [row][column][C] of a pixel
// are those of 2 x 2 pixels. 64 channels of the convolution are channels of one such pixel, or,
// with C = 32, all of two neighbouring columns. Each phase of so many is an image of its own, whose
// pixels lie apart in memory.
struct Phases {
  int channels, width, in_row;  // of a pixel; channels of a phase; phases in a row of 2 x 2 pixels

  __host__ __device__ explicit Phases(const DeviationParams& p)
      : channels(p.phase_channels),
        width(channels > kernels::sm90::kBlock ? channels : kernels::sm90::kBlock),
        in_row(2 * channels / width) {}

  __host__ __device__ int count() const { return 2 * in_row; }
};

// The map that stores 64 channels of the convolution, from `channel` on; `channel` becomes that in
// the map.
__device__ __forceinline__ const CUtensorMap* map_of_phase(const DeviationParams& p, int& channel) {
  if (p.phase_channels == 0) return &p.map_output;
  const Phases phases(p);
  const int phase = channel / phases.width;
  channel -= phase * phases.width;
  return phase == 0 ? &p.map_output : &p.map_phases[phase - 1];
}

// The place of a pixel's norm of 64 channels, from `channel` on, in (images, rows, columns,
// groups). In phases of 32 channels a norm is that of two neighbouring columns.
__device__ __forceinline__ int64_t place_of_norm(const DeviationParams& p, int image, int row,
                                                 int column, int channel) {
  constexpr int kBlock = kernels::sm90::kBlock;
  int rows = p.shape.output.rows, columns = p.shape.output.columns;
  int groups = (p.shape.out_channels - 1) / kBlock + 1;
  if (p.phase_channels > 0) {
    const Phases phases(p);
    const int phase = channel / phases.width;
    channel -= phase * phases.width;
    row = 2 * row + phase / phases.in_row;
    column = phases.in_row * column + phase % phases.in_row;
    rows *= 2;
    columns *= phases.in_row;
    groups = phases.width / kBlock;
  }
  const int64_t pixel = (static_cast<int64_t>(image) * rows + row) * columns + column;
  return pixel * groups + channel / kBlock;
}

// Encodes the maps of all phases.
template <class Element>
cudaError_t encode_phases(DeviationParams& p) {
  const Phases phases(p);
  const Extent& output = p.shape.output;
  const uint64_t pixel = phases.channels * sizeof(Element), line = 2 * pixel * output.columns;
  for (int phase = 0; phase < phases.count(); ++phase) {
    const uint64_t before = phase / phases.in_row * line + phase % phases.in_row * pixel;
    const cudaError_t error = kernels::sm90::encode_tensor_map<Element, 4>(
        phase == 0 ? p.map_output : p.map_phases[phase - 1],
        static_cast<uint8_t*>(p.output) + before,
        {static_cast<uint64_t>(phases.width), static_cast<uint64_t>(output.columns),
         static_cast<uint64_t>(output.rows), static_cast<uint64_t>(output.images)},
        {2 * pixel, 2 * line, 2 * line * output.rows},
        {kernels::sm90::kLineBytes / sizeof(Element), 1u << p.box.columns, 1u << p.box.rows,
         1u << p.box.images},
        {1, 1, 1, 1});
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

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
// 128-byte swizzle. A chunk of channels that do not exist does not count: it is NaN where the input
// is infinite. The caller has synchronised behind the staging, and does so before the next.
template <class Element, class Staged>
__device__ __forceinline__ void store_pixel_norms(const DeviationParams& p, int channel,
                                                  const Box& box, const Staged& staged) {
  if (p.norm_pixels == nullptr) return;
  constexpr int kChunks = sizeof(Element) == 4 ? 8 : 4;  // of a thread
  constexpr int kEntries = 16 / sizeof(Element);         // of a chunk
  const int pixel = threadIdx.x % 128 / 2, half = threadIdx.x % 2;
  const uint8_t* line = block_of_half(staged, half) + pixel * kLineBytes;
  const int first = sizeof(Element) == 4 ? 0 : half * kChunks;
  const int existing = p.shape.out_channels - channel - half * kChunks * kEntries;
  SquareSum<Element> sum = 0;
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    if (i * kEntries >= existing) break;
    const int chunk = (first + i) ^ pixel % 8;
    sum += squares_of<Element>(*reinterpret_cast<const uint4*>(line + chunk * 16));
  }
  __syncwarp();
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
