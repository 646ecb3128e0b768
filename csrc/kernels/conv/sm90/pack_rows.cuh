// Packs the operands of a first layer (pack_rows_params.h), so that the tensor cores' convolution
// (conv.cuh) reads a window of two kernel rows as one line of 64 channels.
#pragma once

#include "kernels/common/launch.cuh"
#include "kernels/common/overlap.cuh"
#include "kernels/conv/sm90/pack_rows_params.h"

namespace spamm::kernels::conv::sm90 {

constexpr int kPackThreads = 256;

// The entries of one pixel, with zeros for padding and for channels that do not exist.
__device__ inline uint2 packed_pixel(const uint16_t* row, bool exists, int channels) {
  uint32_t entries[kPackedChannels];
#pragma unroll
  for (int c = 0; c < kPackedChannels; ++c) entries[c] = exists && c < channels ? row[c] : 0;
  return {entries[0] | entries[1] << 16, entries[2] | entries[3] << 16};
}

// Packs the pixel of column `column` in pair of rows `row` of an image.
__device__ inline void pack_pixel(const PackRowsParams& p, int image, int row, int column) {
  const ConvShape& shape = p.shape;
  const int x = column - shape.padding.columns;
  uint2 of_rows[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int y = 2 * row + i - shape.padding.rows;
    const bool exists = static_cast<unsigned>(y) < shape.input.rows &&
                        static_cast<unsigned>(x) < shape.input.columns;
    const int64_t pixel =
        (static_cast<int64_t>(image) * shape.input.rows + y) * shape.input.columns + x;
    of_rows[i] = packed_pixel(static_cast<const uint16_t*>(p.input) + pixel * shape.channels,
                              exists, shape.channels);
  }
  const int64_t at = (static_cast<int64_t>(image) * p.rows() + row) * p.columns() + column;
  static_cast<uint4*>(p.pairs)[at] = {of_rows[0].x, of_rows[0].y, of_rows[1].x, of_rows[1].y};
  if (p.singles != nullptr) static_cast<uint2*>(p.singles)[at] = of_rows[0];
}

// Packs entry `number` of the weights.
__device__ inline void pack_weight(const PackRowsParams& p, int number) {
  const Size2& kernel = p.shape.kernel;
  const int entry = number % kPackedLine, line = number / kPackedLine;
  const int channel = line / p.kernel_pairs(), pair = line % p.kernel_pairs();
  const bool is_single = 2 * pair + 1 == kernel.rows;
  const int of_pixel = is_single ? kPackedChannels : kPackedPair;
  const int column = entry / of_pixel, row = 2 * pair + entry % of_pixel / kPackedChannels;
  const int c = entry % kPackedChannels;
  const bool exists = column < kernel.columns && c < p.shape.channels;
  const int from = ((channel * kernel.rows + row) * kernel.columns + column) * p.shape.channels + c;
  static_cast<uint16_t*>(p.packed_weight)[number] =
      exists ? static_cast<const uint16_t*>(p.weight)[from] : uint16_t{0};
}

// Thread blocks (x, y, 0) pack the weights. The others pack pair of rows y of image z - 1.
__global__ void __launch_bounds__(kPackThreads)
    pack_rows(const __grid_constant__ PackRowsParams p) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  const int thread = blockIdx.x * kPackThreads + threadIdx.x, threads = gridDim.x * kPackThreads;
  if (blockIdx.z == 0) {
    const int weights = p.shape.out_channels * p.kernel_pairs() * kPackedLine;
    for (int i = blockIdx.y * threads + thread; i < weights; i += gridDim.y * threads) {
      pack_weight(p, i);
    }
    return;
  }
  for (int image = blockIdx.z - 1; image < p.shape.input.images; image += gridDim.z - 1) {
    for (int row = blockIdx.y; row < p.rows(); row += gridDim.y) {
      for (int column = thread; column < p.columns(); column += threads) {
        pack_pixel(p, image, row, column);
      }
    }
  }
}

inline cudaError_t launch_pack_rows(const PackRowsParams& p, cudaStream_t stream) {
  constexpr int kMostBlocks = 65535;  // along y and z
  const dim3 grid(ceil_div(p.columns(), kPackThreads), std::min(p.rows(), kMostBlocks),
                  std::min(p.shape.input.images + 1, kMostBlocks));
  return launch(pack_rows, grid, kPackThreads, 0, /*overlap_previous=*/true, stream, p);
}

}  // namespace spamm::kernels::conv::sm90
