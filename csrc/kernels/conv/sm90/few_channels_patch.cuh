// The input of a tile of the convolution of few input channels: where the tile is, and the copy of
// its patch into shared memory as it lies in memory, with zeros for padding.
#pragma once

#include <cstdint>

#include "kernels/common/ptx_sm80.cuh"
#include "kernels/conv/sm90/few_channels_plan.h"

namespace spamm::kernels::conv::sm90 {

struct FewChannelsTile {
  int image, row, column;  // the first ones
  int first_entry;         // of an input row, where the patch begins: a multiple of 8
  int skew;                // entries of the patch before the first window

  __device__ FewChannelsTile(const FewChannelsParams& p, int number) {
    int column_tile, row_tile, image_tile;
    p.by_column_tiles(number, column_tile, number);
    p.by_row_tiles(image_tile, row_tile, number);
    image = image_tile * p.plan.images;
    row = row_tile * p.plan.rows;
    column = column_tile * p.plan.columns;
    const int entry =
        (column * p.shape.stride.columns - p.shape.padding.columns) * p.shape.channels;
    skew = entry & 7;
    first_entry = entry - skew;
  }
};

// A row of a patch and where it comes from.
struct PatchRow {
  const uint16_t* from;  // where the patch begins in the input row, which may be before it
  int first;             // entries of the input row before that
  int length;            // of the input row; 0 if it lies in the padding or does not exist
  uint16_t* to;

  __device__ PatchRow(const FewChannelsParams& p, const FewChannelsTile& tile, uint16_t* patch,
                      int row) {
    int image = 0;
    if (p.plan.along_images) p.by_patch_rows(image, row, row);
    const Extent& input = p.shape.input;
    const int y = tile.row * p.shape.stride.rows - p.shape.padding.rows + row * p.plan.row_step;
    const bool exists = tile.image + image < input.images && static_cast<unsigned>(y) < input.rows;
    const int entries = input.columns * p.shape.channels;
    const int64_t line = static_cast<int64_t>(tile.image + image) * input.rows + y;
    first = tile.first_entry;
    from = static_cast<const uint16_t*>(p.input) + line * entries + first;
    length = exists ? entries : 0;
    to = patch + image * p.plan.image + row * p.plan.line;
  }

  __device__ bool has(int entry) const { return static_cast<unsigned>(first + entry) < length; }
};

// Starts the copy of a patch, kTogether entries at a time, which lie inside of their row or
// outside. With single entries it is over when this returns. The thread block calls it together;
// some threads share a row.
template <int kTogether>
__device__ void copy_patch(const FewChannelsParams& p, const FewChannelsTile& tile,
                           uint16_t* patch) {
  const int log2 = p.plan.log2_row_threads, step = kTogether << log2;
  const int rows = p.plan.images * p.plan.patch_rows, line = p.plan.line;
  for (int number = threadIdx.x >> log2; number < rows; number += kFewChannelsThreads >> log2) {
    const PatchRow row(p, tile, patch, number);
    const int first = (threadIdx.x & ((1 << log2) - 1)) * kTogether;
    if constexpr (kTogether == 1) {
      constexpr int kUnroll = 8;
      for (int at = first; at < line; at += kUnroll * step) {
        uint32_t entries[kUnroll];
#pragma unroll
        for (int i = 0; i < kUnroll; ++i) {
          const int entry = at + i * step;
          entries[i] = load_two_bytes(row.from + entry, entry < line && row.has(entry));
        }
#pragma unroll
        for (int i = 0; i < kUnroll; ++i) {
          if (at + i * step < line) row.to[at + i * step] = static_cast<uint16_t>(entries[i]);
        }
      }
    } else {
      for (int at = first; at < line; at += step) {
        const bool exists = row.has(at);
        const void* from = exists ? row.from + at : p.input;
        if constexpr (kTogether == 8) {
          copy_async(row.to + at, from, exists ? 16 : 0);
        } else {
          copy_word_async(row.to + at, from, exists ? 4 : 0);
        }
      }
    }
  }
}

__device__ inline void copy_patch(const FewChannelsParams& p, const FewChannelsTile& tile,
                                  uint16_t* patch) {
  switch (p.together) {
    case 8:
      return copy_patch<8>(p, tile, patch);
    case 2:
      return copy_patch<2>(p, tile, patch);
    default:
      return copy_patch<1>(p, tile, patch);
  }
}

}  // namespace spamm::kernels::conv::sm90
