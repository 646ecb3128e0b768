// Block-sparse products: list warps that read the products of a plan in place of norms, and where
// the cells of C are (multiply/params.h). Everything behind the lists is that of dense storage.
#pragma once

#include <limits>
#include <type_traits>

#include "kernels/common/overlap.cuh"
#include "kernels/multiply/params.h"
#include "kernels/multiply/sm90/list.cuh"
#include "kernels/multiply/sm90/params.h"
#include "kernels/multiply/sm90/pipeline.cuh"

namespace spamm::kernels::multiply::sm90 {

// A kernel of dense storage over lists.
template <class Dense>
struct Listed : Dense {
  static constexpr bool kListed = true;
  static constexpr bool kSegmented = false;
  // Room for short lists is enough, and leaves that for stages: the steps in the ring take longer
  // than listing as many.
  static constexpr int kListCapacity = 16;
  // 640 threads are launched with 96 registers each, and more are needed to multiply.
  static constexpr bool kMovesRegisters = Dense::kMultiplyRegisters == 0 && Dense::kThreads == 640;
  static constexpr int kMultiplyRegisters = kMovesRegisters ? 104 : Dense::kMultiplyRegisters;
  static constexpr int kOtherRegisters = kMovesRegisters ? 64 : Dense::kOtherRegisters;
};

// ---- Cells --------------------------------------------------------------------------------------

// Matrices have 64 or 128 columns, as many as C.
template <class Norm>
__device__ __forceinline__ GridPlace place_of(const MultiplyParams<Norm>& p, int cell) {
  const int log2_columns = static_cast<int>(p.n >> 7);
  return {cell >> log2_columns, cell & ((1 << log2_columns) - 1)};
}

// The blocks of C that a warpgroup computes.
template <class Config>
struct OwnCells {
  int cells[Config::kOwn];
};
template <class Config>
using OwnPart = std::conditional_t<Config::kListed, OwnCells<Config>, Tile>;

// All of a tile in dense storage is kept, because an addition now would cost a register.
template <class Config>
__device__ __forceinline__ OwnPart<Config> own_part(const TileOf<Config>& tile, int row,
                                                    int column) {
  if constexpr (Config::kListed) {
    OwnPart<Config> own;
#pragma unroll
    for (int i = 0; i < Config::kOwn; ++i)
      own.cells[i] = tile.cells[row * Config::kColumns + column + i];
    return own;
  } else {
    return tile;
  }
}

__device__ __forceinline__ Tile first_block(const Tile& tile, int row, int column) {
  return {tile.batch, tile.row + row, tile.column + column};
}
template <class Config>
__device__ __forceinline__ const OwnCells<Config>& first_block(const OwnCells<Config>& own, int,
                                                               int) {
  return own;
}

// The place in C of block `column` of a warpgroup, in blocks of 64.
struct BlockPlace {
  bool is_stored;
  int batch, row, column;
};
template <class Norm>
__device__ __forceinline__ BlockPlace place_of(const MultiplyParams<Norm>&, const Tile& first,
                                               int column) {
  return {true, first.batch, first.row, first.column + column};
}
template <class Config, class Norm>
__device__ __forceinline__ BlockPlace place_of(const MultiplyParams<Norm>& p,
                                               const OwnCells<Config>& own, int column) {
  const GridPlace cell = place_of(p, own.cells[column]);
  return {own.cells[column] >= 0, 0, cell.row, cell.column};
}

// ---- Lists --------------------------------------------------------------------------------------

class TilesByWork {
 public:
  __device__ explicit TilesByWork(const ProductLists& lists) : lists_(lists) {
    const int lane = threadIdx.x % 32;
    end_ = lane < kTileClasses ? lists.counts[lane] : 0;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const int before = __shfl_up_sync(~0u, end_, distance);
      if (lane >= distance) end_ += before;
    }
  }

  __device__ int count() const { return __shfl_sync(~0u, end_, 31); }

  __device__ TilePlace at(int number) const {
    const int passed = __popc(__ballot_sync(~0u, end_ <= number));
    const int before = __shfl_sync(~0u, end_, max(passed - 1, 0));
    return lists_.places[static_cast<int64_t>(passed) * lists_.capacity + number -
                         (passed == 0 ? 0 : before)];
  }

 private:
  const ProductLists& lists_;
  int end_;  // of the lane's class
};

// Merges the products of a tile's blocks into steps. Each block has a lane of its own; blocks of
// 128 have one for each part. Lanes of a cell are neighbours, and cells are in row-major order.
template <class Config>
class TileMerge {
  static constexpr int kGranules = Config::kGranules, kUnits = kGranules * kGranules;
  static constexpr int kCells = Config::kRows * Config::kColumns;
  static_assert(kCells * kUnits <= 32);
  static constexpr int kNone = std::numeric_limits<int>::max();

 public:
  CellTile<Config> tile;

  __device__ TileMerge(const ProductLists& lists, TilePlace place)
      : lists_(lists),
        cell_row_(threadIdx.x % 32 / kUnits / Config::kColumns),
        cell_column_(threadIdx.x % 32 / kUnits % Config::kColumns) {
    const int lane = threadIdx.x % 32, unit = lane % kUnits, parts = 1 << lists.log2_parts;
    const int row = (place.row * Config::kRows + cell_row_) * kGranules + unit % kGranules;
    const int column =
        (place.column * Config::kColumns + cell_column_) * kGranules + unit / kGranules;
    const int block_row = row >> lists.log2_parts, block_column = column >> lists.log2_parts;
    part_row_ = row & (parts - 1), part_column_ = column & (parts - 1);
    const bool exists = lane < kCells * kUnits && block_row < lists.c.rows &&
                        (!lists.upper_only || block_column >= block_row);
    const int block = exists ? lists.c.find(block_row, block_column) : -1;
    int cell = block;
    if (block >= 0) {
      next_ = lists.first[block], end_ = lists.first[block + 1];
      if (kGranules == 1) cell = cell_number(block, part_row_, part_column_);
      if (kGranules != 1) cell = lists.cells_c[block];
    }
#pragma unroll
    for (int distance = 1; distance < kUnits; distance *= 2)
      cell = max(cell, __shfl_xor_sync(~0u, cell, distance));
#pragma unroll
    for (int i = 0; i < kCells; ++i) tile.cells[i] = __shfl_sync(~0u, cell, i * kUnits);
    advance();
    advance();
  }

  // Writes all steps, marked or not.
  template <class Writer>
  __device__ void list(Writer& writer, bool marked) {
    while (true) {
      const int k = __reduce_min_sync(~0u, head_.k) / kGranules;
      if (k == kNone / kGranules) break;
      if constexpr (kGranules == 1) {
        const bool takes = head_.k == k;
        const uint32_t taking = __ballot_sync(~0u, takes);
        for (int part = 0; part < 1 << lists_.log2_parts; ++part) {
          CellStep<Config>& step = writer.add(tile);
          if (takes) {
            step.a[cell_row_] = cell_number(head_.slot_a, part_row_, part);
            step.b[cell_column_] = cell_number(head_.slot_b, part, part_column_);
          }
          if (threadIdx.x % 32 == 0) {
            step.mask.words[0] = taking;
            step.mask.mark(marked);
          }
        }
        if (takes) advance();
      } else {
        CellStep<Config>& step = writer.add(tile);
        uint32_t taking[kGranules];
#pragma unroll
        for (int part = 0; part < kGranules; ++part) {
          const bool takes = head_.k == k * kGranules + part;
          taking[part] = __ballot_sync(~0u, takes);
          if (takes) {
            step.a[cell_row_] = lists_.cells_a[head_.slot_a];
            step.b[cell_column_] = lists_.cells_b[head_.slot_b];
            advance();
          }
        }
        if (threadIdx.x % 32 == 0) {
#pragma unroll
          for (int word = 0; word < (kCells + 3) / 4; ++word)
            step.mask.words[word] = spread(taking[0] >> word * 16 & 0xffff) |
                                    spread(taking[1] >> word * 16 & 0xffff) << 4;
        }
      }
    }
  }

 private:
  struct Product {
    int k, slot_a, slot_b;
  };

  // Reads one product ahead.
  __device__ void advance() {
    head_ = following_;
    following_.k = kNone;
    if (next_ == end_) return;
    const int slot_a = lists_.slots_a[next_];
    following_ = {lists_.col_a[slot_a], slot_a, lists_.slots_b[next_]};
    ++next_;
  }

  __device__ int cell_number(int block, int row, int column) const {
    return (((block << lists_.log2_parts) + row) << lists_.log2_parts) + column;
  }

  // Four bits to the lower half of each byte.
  __device__ static uint32_t spread(uint32_t bits) {
    bits = (bits | bits << 8) & 0x00ff00ff;
    return (bits | bits << 4) & 0x0f0f0f0f;
  }

  const ProductLists& lists_;
  int cell_row_, cell_column_, part_row_, part_column_;
  int64_t next_ = 0, end_ = 0;
  Product head_, following_{kNone, 0, 0};
};

// As list_steps(), from lists.
template <class Config, class Params>
__device__ void list_products(const Params& params, int warp, Storage<Config>& storage) {
  wait_for_previous_kernel();
  const TilesByWork tiles(params.lists);
  const int count = tiles.count();
  ListWriter<typename Storage<Config>::Ring, 1> writer(storage.ring, warp);
  for (int number = warp == 0 ? blockIdx.x : claim_tile(params); number < count;
       number = claim_tile(params)) {
    TileMerge<Config> merge(params.lists, tiles.at(number));
    merge.list(writer, is_marked<Config>(params, merge.tile));
    writer.end_tile(merge.tile);
    writer.wait_for_room();
  }
  writer.end_work();
}

}  // namespace spamm::kernels::multiply::sm90
