// The operands of the convolution of few input channels, in shared memory: a tile's patch of the
// input as it lies in memory, with zeros for padding, and the weights; and which products count.
#pragma once

#include <cstdint>

#include "kernels/common/ptx_sm80.cuh"
#include "kernels/common/skip_test.cuh"
#include "kernels/common/wgmma_sm90.cuh"
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
    const int from = (column * p.shape.stride.columns - p.shape.padding.columns) * p.shape.channels;
    skew = from & 7;
    first_entry = from - skew;
  }
};

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

// Starts the copy of a patch, kTogether entries at a time, inside of their row or outside. Single
// entries are there when this returns. All threads call it; some share a row.
template <int kTogether>
__device__ void copy_patch(const FewChannelsParams& p, const FewChannelsTile& tile, uint16_t* to) {
  const int log2 = p.plan.log2_row_threads, step = kTogether << log2;
  const int rows = p.plan.images * p.plan.patch_rows, line = p.plan.line;
  for (int number = threadIdx.x >> log2; number < rows; number += kFewChannelsThreads >> log2) {
    const PatchRow row(p, tile, to, number);
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

// ---- Weights: operand blocks with an output channel in each line, for each parity of columns, and
// where a product finds its pixels

// The output channel (0 to 63) of column `column` of a product. A thread of the result has 8
// neighbouring channels in the lower 32 and 8 in the upper 32.
__device__ inline int channel_of_column(int column) {
  return column / 32 * 32 + column % 8 / 2 * 8 + column / 8 % 4 * 2 + column % 2;
}

// Tells whether an entry of a kernel row, counted from its even beginning, is one of the window.
__device__ inline bool is_in_window(const FewChannelsWindow& window, int parity, int entry) {
  return static_cast<unsigned>(entry - window.lead(parity)) < window.entries;
}

// Eight entries of K of an output channel, where the operand block has them together.
struct WeightChunk {
  kernels::sm90::OperandBlock* block;
  int column, chunk;
  uint32_t entries[8];

  // Starts to load chunk `number`, with zeros where there is no window and no channel.
  __device__ void load(const FewChannelsParams& p, int first_channel, int number,
                       kernels::sm90::OperandBlock* blocks) {
    constexpr int kPairs = 4, kChunksOfLine = 8;
    const FewChannelsWindow& window = p.plan.window;
    const int chunks = p.plan.all_steps() * 2, kernel_rows = p.shape.kernel.rows;
    const int line = number / chunks, parity = line / 64;
    const int of_line = number - line * chunks;
    column = line % 64;
    chunk = of_line % kChunksOfLine;
    block = blocks + parity * p.plan.weight_blocks() + of_line / kChunksOfLine;
    const int channel = first_channel + channel_of_column(column);
    int row = of_line * kPairs / window.pairs;
    int entry = (of_line * kPairs - row * window.pairs) * 2;
    const auto* from = static_cast<const uint16_t*>(p.weight) +
                       static_cast<int64_t>(channel) * kernel_rows * window.entries -
                       window.lead(parity);
#pragma unroll
    for (int i = 0; i < 2 * kPairs; i += 2) {
      const bool exists = channel < p.shape.out_channels && row < kernel_rows;
      const auto* pair = from + row * window.entries + entry;
      entries[i] = load_two_bytes(pair, exists && is_in_window(window, parity, entry));
      entries[i + 1] = load_two_bytes(pair + 1, exists && is_in_window(window, parity, entry + 1));
      entry += 2;
      if (entry == 2 * window.pairs) entry = 0, ++row;
    }
  }

  __device__ void store() const {
    uint8_t* line = block->bytes + column * kernels::sm90::kLineBytes;
    *reinterpret_cast<uint4*>(line + (chunk ^ column % 8) * 16) = {
        entries[0] | entries[1] << 16, entries[2] | entries[3] << 16, entries[4] | entries[5] << 16,
        entries[6] | entries[7] << 16};
  }
};

// Copies the weights of 64 output channels from `first_channel` on. All threads call it.
__device__ inline void stage_weights(const FewChannelsParams& p, int first_channel,
                                     kernels::sm90::OperandBlock* blocks) {
  constexpr int kAtOnce = 3;  // 24 loads in flight
  const int count = p.plan.window.parities * 64 * p.plan.all_steps() * 2;
#pragma unroll 1
  for (int first = threadIdx.x; first < count; first += kAtOnce * kFewChannelsThreads) {
    WeightChunk chunks[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      chunks[i].load(p, first_channel, min(first + i * kFewChannelsThreads, count - 1), blocks);
    }
#pragma unroll
    for (const WeightChunk& chunk : chunks) chunk.store();
  }
}

// The place of a pair of entries: the distance from the window's beginning in bytes, and below it
// which of its bytes count, as a selector of bytes of (pair, 0). What does not count is part of
// another pixel, which may be infinite: a weight of zero does not help against that. Where products
// may be skipped, a byte for each entry takes the selector's place: the least rank of its pixel
// with which it counts, or 128 if it does not.
struct PairPlace {
  uint32_t bits;

  __device__ uint32_t distance() const { return bits >> 16; }
  // Not __byte_perm, which clears bits of the selector that the instruction does not look at.
  __device__ uint32_t masked(uint32_t pair) const {
    uint32_t word;
    asm("prmt.b32 %0, %1, 0, %2;" : "=r"(word) : "r"(pair), "r"(bits));
    return word;
  }
  // `ranks`: a byte for each entry, 128 + its pixel's rank. No byte borrows in the difference, so
  // its highest bit says if the entry counts.
  __device__ uint32_t valid(uint32_t pair, uint32_t ranks) const {
    uint32_t mask;
    asm("prmt.b32 %0, %1, 0, 0x9988;" : "=r"(mask) : "r"(ranks - bits));
    return pair & mask;
  }
};

template <bool kMasked>
__device__ PairPlace pair_place(const FewChannelsParams& p, int parity, int number,
                                const PixelRanks& ranks) {
  const FewChannelsWindow& window = p.plan.window;
  const int row = number / window.pairs, pair = number - row * window.pairs;
  if (row >= p.shape.kernel.rows) return {kMasked ? 0x8080u : 0x4444u};
  const auto counts = [&](int entry, uint32_t selector) -> uint32_t {
    if (!is_in_window(window, parity, entry)) return kMasked ? 0x80 : 0x44;
    if constexpr (!kMasked) return selector;
    const int column = (entry - window.lead(parity)) / p.shape.channels;
    return ranks.least[row * p.shape.kernel.columns + column];
  };
  const uint32_t low = counts(2 * pair, 0x10), high = counts(2 * pair + 1, 0x32);
  const uint32_t distance = (row * p.plan.kernel_step * p.plan.line + 2 * pair) * 2;
  return {distance << 16 | high << 8 | low};
}

// Fills the table of places: for each parity, step and thread of four the thread's two pairs.
template <bool kMasked>
__device__ void stage_places(const FewChannelsParams& p, PairPlace* to, const PixelRanks& ranks) {
  const int count = p.plan.all_steps() * 8;
  for (int i = threadIdx.x; i < p.plan.window.parities * count; i += kFewChannelsThreads) {
    const int parity = i / count, place = i - parity * count;
    const int pair_of_step = place % 8 / 2 + place % 2 * 4;
    to[i] = pair_place<kMasked>(p, parity, place / 8 * 8 + pair_of_step, ranks);
  }
}

// ---- Which products count: one that is valid stays so with a larger norm of the weight. So a
// pixel's rank is how many kernel positions are valid with it, in the order of their norms.

// Orders the kernel positions. The thread block calls this and rank_pixels() together, and all have
// what they write when they return.
__device__ inline void order_positions(const FewChannelsParams& p, int channel, PixelRanks& ranks) {
  const int positions = p.shape.kernel.rows * p.shape.kernel.columns, position = threadIdx.x;
  const float* norms = p.held.weights + (channel >> p.held.log2_block_m) * positions;
  // NaN and infinity keep the same products, all of them.
  const auto norm = [&](int i) { return isnan(norms[i]) ? INFINITY : norms[i]; };
  if (position < positions) {
    const float own = norm(position);
    int place = 0;
    for (int i = 0; i < positions; ++i) {
      const float other = norm(i);
      place += other > own || (other == own && i < position);
    }
    ranks.ordered[place] = own;
    ranks.least[position] = static_cast<uint8_t>(place + 1);
  }
  __syncthreads();
}

// Sets `of_entries`, which is laid out like a patch, to 128 + the rank of each entry's pixel.
__device__ inline void rank_pixels(const FewChannelsParams& p, const FewChannelsTile& tile,
                                   const PixelRanks& ranks, uint8_t* of_entries) {
  constexpr int kUnroll = 4, kMostBefore = 7;  // pixels before the first window
  const auto [images, rows, columns] = p.shape.input;
  const int positions = p.shape.kernel.rows * p.shape.kernel.columns, line = p.plan.line;
  const int edge = 1 << p.held.log2_images, block = tile.image >> p.held.log2_images;
  const auto whole = static_cast<float>(edge), rest = static_cast<float>(images - block * edge);
  const float scale = partial_block_scale(whole, min(whole, rest)), tau = p.held.tau.value();
  const int left = tile.column * p.shape.stride.columns - p.shape.padding.columns - kMostBefore;
  const auto entry_of = [&](int x) { return x * p.shape.channels - tile.first_entry; };
  for (int row = threadIdx.x / 32; row < p.plan.patch_rows; row += kFewChannelsThreads / 32) {
    const int y = tile.row * p.shape.stride.rows - p.shape.padding.rows + row * p.plan.row_step;
    const float* norms = p.held.pixels + (static_cast<int64_t>(block) * rows + y) * columns;
    for (int x = left + threadIdx.x % 32; entry_of(x) < line; x += 32 * kUnroll) {
      float norm[kUnroll];
      int rank[kUnroll] = {};
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        const int at = x + 32 * i;
        const bool exists = static_cast<unsigned>(y) < rows && static_cast<unsigned>(at) < columns;
        norm[i] = exists ? norm_product(norms[at], scale) : 0;
      }
      for (int step = 1 << (31 - __clz(positions)); step > 0; step /= 2) {
#pragma unroll
        for (int i = 0; i < kUnroll; ++i) {
          const int n = rank[i] + step;
          if (n <= positions && is_valid_im2col(ranks.ordered[n - 1], norm[i], tau)) rank[i] = n;
        }
      }
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        for (int c = 0; c < p.shape.channels; ++c) {
          const int entry = entry_of(x + 32 * i) + c;
          if (static_cast<unsigned>(entry) < line) {
            of_entries[row * line + entry] = static_cast<uint8_t>(128 + rank[i]);
          }
        }
      }
    }
  }
  __syncthreads();
}

}  // namespace spamm::kernels::conv::sm90
