// The list warps of the Hopper multiply. They claim tiles and list the valid steps of each, ahead
// of the loads, so that loads never wait for norms or divisions. If most tiles have few valid
// steps, the latency of listing decides the run time. So there are two list warps, which take the
// tiles of a thread block alternately.
#pragma once

#include "kernels/common/overlap.cuh"
#include "kernels/common/parameters.h"
#include "kernels/common/skip_test.cuh"
#include "kernels/multiply/sm90/params.h"
#include "kernels/multiply/sm90/pipeline.cuh"

namespace spamm::kernels::multiply::sm90 {

// ---- Segments ----------------------------------------------------------------------------------

// Segments: the steps of a tile, dealt out to several thread blocks where C has too few tiles to
// fill the chip evenly. Each computes its sums of the whole tile; f64/multiply.cuh adds them.
//
// Which step belongs to which segment follows from its number alone. So whether other blocks are
// skipped changes no bit, and neither does timing. Neighbouring steps go to different segments,
// because in a decay matrix the valid steps of a tile are neighbours.

// The number of a tile's segments, as a power of two.
template <class Config, class Norm>
__device__ __forceinline__ int log2_segments(const TiledProduct<Norm>& p) {
  return Config::kSegmented ? p.segments.log2_segments : 0;
}

template <class Config, class Norm>
__device__ __forceinline__ int batch_of(const TiledProduct<Norm>& p, const Tile& tile) {
  return tile.batch >> log2_segments<Config>(p);
}
template <class Config, class Norm>
__device__ __forceinline__ int batch_of(const TiledProduct<Norm>&, const CellTile<Config>&) {
  return 0;
}

// The number of a segment's step `index`, among all of its tile. From the number of its steps on,
// an index gives a number past the end.
template <class Config, class Norm>
__device__ __forceinline__ int step_number(const TiledProduct<Norm>& p, const Tile& tile,
                                           int index) {
  const int log2 = log2_segments<Config>(p);
  return (index << log2) + (tile.batch & ((1 << log2) - 1));
}

// The number of indices of a segment. The last one may lie past the end of all `steps`.
template <class Config, class Norm>
__device__ __forceinline__ int steps_of_segment(const TiledProduct<Norm>& p, int steps) {
  return ((steps - 1) >> log2_segments<Config>(p)) + 1;
}

// The norms of one step of a tile, one for each granule.
template <class Config>
struct StepNorms {
  static constexpr int kGranules = Config::kGranules;
  static constexpr int kRows = Config::kRows * kGranules, kColumns = Config::kColumns * kGranules;
  typename Config::Norm a[kGranules][kRows], b[kGranules][kColumns];

  __device__ Mask<Config> mask(typename Config::Norm tau) const {
    Mask<Config> mask{};
#pragma unroll
    for (int i = 0; i < kRows * kColumns * kGranules; ++i) {
      const int row = i % kRows, column = i / kRows % kColumns, k = i / kRows / kColumns;
      const int block = row / kGranules * Config::kColumns + column / kGranules;
      const int in_block = (k * kGranules + column % kGranules) * kGranules + row % kGranules;
      mask.set(block * Config::kBlockBits + in_block,
               is_valid(norm_product(a[k][row], b[k][column]), tau));
    }
    return mask;
  }
};

// Reads the norms of a tile.
//
// A granule beyond the edge of A or B gets the norm of the last granule inside. It holds zeros, and
// this way its block can be multiplied as a whole. Blocks of C that lie beyond its edge, or below
// the diagonal where only the upper triangle is asked for, are never valid. With kSkipsEdges, nor
// are granules beyond the edge.
template <class Config>
class TileNorms {
  using Norm = typename Config::Norm;
  static constexpr int kRows = StepNorms<Config>::kRows, kColumns = StepNorms<Config>::kColumns;

 public:
  Mask<Config> inside{};  // the bits of what is asked for of C

  __device__ TileNorms(const MultiplyParams<Norm>& p, int batch, Tile tile)
      : log2_block_k_(p.log2_block_k),
        depth_(((p.k - 1) >> p.log2_block_k) + 1),
        b_columns_(((p.n - 1) >> p.log2_block_n) + 1) {
    const int a_rows = ((p.m - 1) >> p.log2_block_m) + 1;
    b_ = p.norm_b + static_cast<int64_t>(batch) * depth_ * b_columns_;
#pragma unroll
    for (int column = 0; column < kColumns; ++column) {
      const int first = tile.column * kBlock + column * Config::kGranule;
      b_column_[column] = min(first >> p.log2_block_n, b_columns_ - 1);
    }
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      const int first = tile.row * kBlock + row * Config::kGranule;
      const int a_row = min(first >> p.log2_block_m, a_rows - 1);
      a_[row] = p.norm_a + (static_cast<int64_t>(batch) * a_rows + a_row) * depth_;
    }
#pragma unroll
    for (int i = 0; i < Config::kMaskBits; ++i) {
      const int block = i / Config::kBlockBits;
      const int row = tile.row + block / Config::kColumns;
      const int column = tile.column + block % Config::kColumns;
      // The begin of the block or, with kSkipsEdges, of the granule.
      constexpr int kPart = Config::kSkipsEdges ? Config::kGranule : 0;
      const int first_row = row * kBlock + i % Config::kGranules * kPart;
      const int first_column = column * kBlock + i / Config::kGranules % Config::kGranules * kPart;
      inside.set(i, first_row < p.m && first_column < p.n && (!p.upper_only || row <= column));
    }
  }

  __device__ StepNorms<Config> at(int step) const {
    StepNorms<Config> norms;
#pragma unroll
    for (int part = 0; part < Config::kGranules; ++part) {
      const int first = step * kBlock + part * Config::kGranule;
      const int k = min(first >> log2_block_k_, depth_ - 1);
#pragma unroll
      for (int row = 0; row < kRows; ++row) norms.a[part][row] = a_[row][k];
#pragma unroll
      for (int column = 0; column < kColumns; ++column) {
        norms.b[part][column] = b_[static_cast<int64_t>(k) * b_columns_ + b_column_[column]];
      }
    }
    return norms;
  }

 private:
  const Norm* a_[kRows];
  const Norm* b_;
  int log2_block_k_, depth_, b_columns_, b_column_[kColumns];
};

// The number of the next unclaimed tile. p.tiles or more: there is none.
template <class Norm>
__device__ int claim_tile(const TiledProduct<Norm>& p) {
  if (!p.claims_tiles) return p.tiles;
  int claimed = 0;
  if (threadIdx.x % 32 == 0) claimed = atomicAdd(p.product.next_tile, 1);
  return gridDim.x + __shfl_sync(~0u, claimed, 0);
}

// Waits until all tiles before this one's turn are loaded. Thread blocks that load at the same time
// share operands in L2. Over many steps they drift apart, until each reads memory for itself.
//
// A list warp claims a tile when its last one is loaded. So when the two of each thread block have
// tiles of this turn or later, or none is left for them, as many are claimed. The wait ends without
// that, too, since other kernels may keep a thread block from running.
template <class Norm>
__device__ void keep_pace(const TiledProduct<Norm>& p, int number) {
  constexpr int kMostWaits = 1 << 13, kNanoseconds = 250;
  const int claimed = number / p.turn * p.turn + static_cast<int>(gridDim.x);
  const volatile int* const counter = p.product.next_tile;
  if (threadIdx.x % 32 == 0) {
    for (int i = 0; i < kMostWaits && *counter < claimed; ++i) __nanosleep(kNanoseconds);
  }
  __syncwarp();
}

// The tile with this number. Tile rows form groups, and within a group the order is column by
// column, so that tiles in flight share rows of A and columns of B in L2. A group starts half a
// turn away from the diagonal: in a decay matrix the heavy tiles then come in the middle, and light
// tiles balance the end. The whole order is reversed, because L2 still holds the operands' last
// rows, which the norm kernel has just read. Tiles that lie outside C for the most part have less
// work, and come last: those of the last column, then those of the last row.
template <class Config, class Norm>
__device__ Tile tile_at(const TiledProduct<Norm>& p, int number) {
  const int of_batch = p.tile_rows * p.tile_columns, batch_in_order = number / of_batch;
  const int batch = (p.tiles >> log2_segments<Config>(p)) / of_batch - 1 - batch_in_order;
  const int in_batch = number - batch_in_order * of_batch;
  const int inner = p.inner_rows * p.inner_columns;
  if (in_batch >= inner) {
    const int in_column = p.inner_columns < p.tile_columns ? p.tile_rows : 0;
    const int at = in_batch - inner;
    const GridPlace place = at < in_column ? GridPlace{at, p.tile_columns - 1}
                                           : GridPlace{p.tile_rows - 1, at - in_column};
    return {batch, place.row * Config::kRows, place.column * Config::kColumns};
  }
  const int first_row = in_batch / (p.group_rows * p.inner_columns) * p.group_rows;
  const int in_group = in_batch - first_row * p.inner_columns;
  const int rows = min(p.group_rows, p.inner_rows - first_row);
  const int column = in_group / rows, row = first_row + in_group - column * rows;
  // In the reversed order. A folded grid has its diagonal where row and column are equal.
  const int diagonal = p.folded_edge != 0 ? first_row + p.inner_columns - p.inner_rows
                                          : first_row * p.inner_columns / p.inner_rows;
  const int turned = (column + diagonal + p.inner_columns / 2) % p.inner_columns;
  GridPlace place{p.inner_rows - 1 - row, p.inner_columns - 1 - turned};
  if (p.folded_edge != 0) place = unfold(place, p.folded_edge);
  return {batch, place.row * Config::kRows, place.column * Config::kColumns};
}

// The tile and segment with this number. The segments of a tile follow each other.
template <class Config, class Norm>
__device__ Tile segment_at(const TiledProduct<Norm>& p, int number) {
  const int log2 = log2_segments<Config>(p);
  Tile tile = tile_at<Config>(p, number >> log2);
  tile.batch = (tile.batch << log2) + (number & ((1 << log2) - 1));
  return tile;
}

// Tells whether nothing of a tile is asked for.
template <class Config, class Norm>
__device__ bool is_below(const TiledProduct<Norm>& p, Tile tile) {
  return p.product.upper_only && tile.column + Config::kColumns <= tile.row;
}

// Tells whether the steps of a tile are to be marked. Overloaded for kernels that mark some.
template <class Config, class Norm>
__device__ bool is_marked(const TiledProduct<Norm>&, const TileOf<Config>&) {
  return false;
}

// `warp` counts the list warps.
template <class Config, class Params>
__device__ void list_steps(const Params& p, int warp, Storage<Config>& storage) {
  constexpr int kUnroll = 2 / Config::kGranules;  // loads the norms of up to 64 steps at a time
  const int lane = threadIdx.x % 32;
  const int steps = (p.product.k - 1) / kBlock + 1, own_steps = steps_of_segment<Config>(p, steps);
  ListWriter<typename Storage<Config>::Ring, 1> writer(storage.ring, warp);

  bool waited = false;
  typename Config::Norm tau{};
  for (int number = blockIdx.x; number < p.tiles; number = claim_tile(p)) {
    const Tile tile = segment_at<Config>(p, number);
    const TileNorms<Config> norms(p.product, batch_of<Config>(p, tile), tile);
    if (!waited) {
      // As late as possible: dividing takes as long as reading norms. Nothing is loaded or stored
      // before it is listed, so no other warp needs to wait here.
      wait_for_previous_kernel();
      waited = true;
      tau = p.product.tau.value();
      if (warp != 0) continue;  // the first tile is that of the other list warp
    }
    if (is_below<Config>(p, tile)) continue;
    // Waiting for the longest tile of a turn loses more where steps are skipped. A tau below 0, by
    // which ranks skip nothing (spamm_torch/_rank_product.py), keeps no pace either.
    if (p.turn != 0 && number >= p.turn && tau == 0) keep_pace(p, number);
    const bool marked = is_marked<Config>(p, tile);
#pragma unroll 1
    for (int first = lane; first - lane < own_steps; first += 32 * kUnroll) {
      StepNorms<Config> step_norms[kUnroll];
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        step_norms[i] = norms.at(min(step_number<Config>(p, tile, first + 32 * i), steps - 1));
      }
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        const int step = step_number<Config>(p, tile, first + 32 * i);
        auto mask = step < steps ? step_norms[i].mask(tau) & norms.inside : Mask<Config>{};
        if constexpr (Config::kMaskBits < 32) mask.mark(marked);
        writer.append(tile, {step, mask});
      }
    }
    writer.end_tile(tile);
    writer.wait_for_room();
  }
  writer.end_work();
}

}  // namespace spamm::kernels::multiply::sm90
