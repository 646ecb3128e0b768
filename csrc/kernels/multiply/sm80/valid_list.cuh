// The list of the valid steps of a tile (the paper's bitmap and map_offset). All threads test steps
// in parallel and compact the valid ones, in order, into shared memory.
//
// A tile has kRows x kColumns sub-tiles of 32 x 32, and a step is 32 of K. Every block edge is a
// multiple of 32, so one bit says whether a step is valid for a sub-tile. The list has a fixed
// length: a long K is listed in several rounds.
#pragma once

#include <cstdint>

#include "kernels/common/skip_test.cuh"
#include "kernels/multiply/params.h"

namespace spamm::kernels {

constexpr int kSubTile = 32, kLog2SubTile = 5;

// The mask of a step for the tile whose first sub-tile is (row, column): bit r * kColumns + c is
// set if the step is valid for sub-tile (r, c), as in ValidList::Entry.
template <int kRows, int kColumns, class Norm>
__device__ uint32_t valid_mask(const MultiplyParams<Norm>& p, Norm tau, int batch, int row,
                               int column, int step) {
  const int64_t blocks_m = ((p.m - 1) >> p.log2_block_m) + 1;
  const int64_t blocks_k = ((p.k - 1) >> p.log2_block_k) + 1;
  const int64_t blocks_n = ((p.n - 1) >> p.log2_block_n) + 1;
  const int64_t sub_rows = (p.m + kSubTile - 1) / kSubTile;
  const int64_t sub_columns = (p.n + kSubTile - 1) / kSubTile;
  const int64_t k = step >> (p.log2_block_k - kLog2SubTile);
  const Norm* a = p.norm_a + batch * blocks_m * blocks_k + k;
  const Norm* b = p.norm_b + (batch * blocks_k + k) * blocks_n;
  Norm norm_b[kColumns];
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    const bool inside = column + c < sub_columns;
    norm_b[c] = inside ? b[(column + c) >> (p.log2_block_n - kLog2SubTile)] : 0;
  }
  uint32_t mask = 0;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (row + r >= sub_rows) break;
    const Norm norm_a = a[((row + r) >> (p.log2_block_m - kLog2SubTile)) * blocks_k];
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const bool inside = column + c < sub_columns;
      const bool valid = inside && is_valid(norm_product(norm_a, norm_b[c]), tau);
      mask |= static_cast<uint32_t>(valid) << (r * kColumns + c);
    }
  }
  return mask;
}

template <int kRows, int kColumns, int kThreads>
class ValidList {
  static_assert(kRows * kColumns <= 16 && kRows <= 8 && kColumns <= 8, "parts of a packed entry");
  static constexpr int kCapacity = 512;

 public:
  struct Entry {
    int step;
    uint32_t packed;

    // Bit row * kColumns + column for each sub-tile.
    __device__ uint32_t mask() const { return packed & 0xffff; }
    // A bit for each row (or column) of sub-tiles in which the step is valid for any sub-tile.
    __device__ uint32_t rows() const { return packed >> 16 & 0xff; }
    __device__ uint32_t columns() const { return packed >> 24; }
  };

  struct Storage {
    Entry entries[kCapacity];
    int warp_counts[kThreads / 32];
  };

  __device__ ValidList(int64_t depth, Storage& storage)
      : storage_(storage), steps_(static_cast<int>((depth + kSubTile - 1) / kSubTile)) {}

  // Lists the next steps for which mask_of(step) is not 0 and returns their number, or 0 at the end
  // of K. All threads of the thread block call it together.
  template <class MaskOf>
  __device__ int fill(const MaskOf& mask_of) {
    int count = 0;
    for (; next_ < steps_ && count + kThreads <= kCapacity; next_ += kThreads) {
      const int step = next_ + static_cast<int>(threadIdx.x);
      const uint32_t mask = step < steps_ ? mask_of(step) : 0;
      count += append(count, step, mask);
    }
    return count;
  }

  __device__ Entry operator[](int index) const { return storage_.entries[index]; }

 private:
  // Appends each thread's step unless its mask is 0, in thread order. Returns the number appended.
  __device__ int append(int count, int step, uint32_t mask) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const uint32_t bitmap = __ballot_sync(~0u, mask != 0);
    if (lane == 0) storage_.warp_counts[warp] = __popc(bitmap);
    __syncthreads();
    int before = 0, total = 0;
#pragma unroll
    for (int w = 0; w < kThreads / 32; ++w) {
      if (w == warp) before = total;
      total += storage_.warp_counts[w];
    }
    if (mask != 0) {
      const int slot = count + before + __popc(bitmap & ((1u << lane) - 1));
      storage_.entries[slot] = {step, mask | rows_of(mask) << 16 | columns_of(mask) << 24};
    }
    __syncthreads();
    return total;
  }

  __device__ static uint32_t rows_of(uint32_t mask) {
    uint32_t rows = 0;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      rows |= static_cast<uint32_t>((mask >> r * kColumns & ((1u << kColumns) - 1)) != 0) << r;
    }
    return rows;
  }

  __device__ static uint32_t columns_of(uint32_t mask) {
    uint32_t columns = 0;
#pragma unroll
    for (int r = 0; r < kRows; ++r) columns |= mask >> r * kColumns;
    return columns & ((1u << kColumns) - 1);
  }

  Storage& storage_;
  int steps_;
  int next_ = 0;  // the first step not yet tested
};

}  // namespace spamm::kernels
