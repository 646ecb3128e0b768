// The input of a tile of the convolution of few input channels: where the tile is, and the copy of
// its patch into shared memory as it lies in memory, with zeros for padding.
#pragma once

#include <cstdint>

#include "kernels/common/ptx_sm80.cuh"
#include "kernels/conv/sm90/few_channels_params.h"

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

// Entry `at` of patch row `row` in the input; null if it lies in the padding or does not exist.
__device__ inline const uint16_t* patch_source(const FewChannelsParams& p,
                                               const FewChannelsTile& tile, int row, int at) {
  int image = 0;
  if (p.plan.along_images) p.by_patch_rows(image, row, row);
  image += tile.image;
  const Extent& input = p.shape.input;
  const int y = tile.row * p.shape.stride.rows - p.shape.padding.rows + row * p.plan.row_step;
  const int length = input.columns * p.shape.channels, entry = tile.first_entry + at;
  const bool exists = image < input.images && static_cast<unsigned>(y) < input.rows &&
                      static_cast<unsigned>(entry) < length;
  if (!exists) return nullptr;
  return static_cast<const uint16_t*>(p.input) +
         (static_cast<int64_t>(image) * input.rows + y) * length + entry;
}

__device__ inline int patch_target(const FewChannelsParams& p, int row, int at) {
  int image = 0;
  if (p.plan.along_images) p.by_patch_rows(image, row, row);
  return image * p.plan.image + row * p.plan.line + at;
}

// Starts the copy, kTogether entries at a time, which lie inside of their row or outside. With
// single entries the copy is over when it returns. The thread block calls it together.
template <int kTogether>
__device__ void copy_patch(const FewChannelsParams& p, const FewChannelsTile& tile,
                           uint16_t* patch) {
  constexpr int kUnroll = kTogether == 1 ? 8 : 2;
  const int count = p.plan.images * p.plan.patch_rows * p.by_copies.divisor;
  for (int first = threadIdx.x; first < count; first += kUnroll * kFewChannelsThreads) {
    const uint16_t* from[kUnroll];
    int to[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      int row, number;
      p.by_copies(row, number, min(first + i * kFewChannelsThreads, count - 1));
      from[i] = patch_source(p, tile, row, number * kTogether);
      to[i] = patch_target(p, row, number * kTogether);
    }
    if constexpr (kTogether == 1) {
      uint16_t entries[kUnroll];
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) entries[i] = from[i] == nullptr ? 0 : *from[i];
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) patch[to[i]] = entries[i];
    } else {
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        const bool exists = from[i] != nullptr;
        const void* source = exists ? from[i] : p.input;
        if constexpr (kTogether == 8) {
          copy_async(patch + to[i], source, exists ? 16 : 0);
        } else {
          copy_word_async(patch + to[i], source, exists ? 4 : 0);
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
