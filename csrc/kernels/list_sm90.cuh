// The list warp of the Hopper multiply: claims tiles and lists the valid steps of each, a tile
// ahead of the loads, so that neither norms nor divisions hold these up.
#pragma once

#include "multiply_sm90_params.h"
#include "pipeline_sm90.cuh"
#include "skip_test.cuh"

namespace spamm::kernels::sm90 {

// The norms that decide one step of a tile.
template <class Config>
struct StepNorms {
  float a[Config::kRows], b[Config::kColumns];

  __device__ uint32_t mask(float tau) const {
    uint32_t bits = 0;
#pragma unroll
    for (int row = 0; row < Config::kRows; ++row) {
#pragma unroll
      for (int column = 0; column < Config::kColumns; ++column) {
        const bool valid = is_valid(norm_product(a[row], b[column]), tau);
        bits |= static_cast<uint32_t>(valid) << (row * Config::kColumns + column);
      }
    }
    return bits;
  }
};

// The rows of A's norm map and the columns of B's that a tile needs.
template <class Config>
class TileNorms {
 public:
  uint32_t inside = 0;  // the mask's bits that lie in C

  __device__ TileNorms(const MultiplyParams<float>& p, Tile tile)
      : log2_block_k_(p.log2_block_k - 6), b_columns_(((p.n - 1) >> p.log2_block_n) + 1) {
    const int a_rows = ((p.m - 1) >> p.log2_block_m) + 1;
    const int depth = ((p.k - 1) >> p.log2_block_k) + 1;
    b_ = p.norm_b + static_cast<int64_t>(tile.batch) * depth * b_columns_;
    uint32_t columns_inside = 0;
#pragma unroll
    for (int column = 0; column < Config::kColumns; ++column) {
      const int first = (tile.column + column) * kBlock;
      columns_inside |= static_cast<uint32_t>(first < p.n) << column;
      b_column_[column] = min(first >> p.log2_block_n, b_columns_ - 1);
    }
#pragma unroll
    for (int row = 0; row < Config::kRows; ++row) {
      const int first = (tile.row + row) * kBlock;
      if (first < p.m) inside |= columns_inside << (row * Config::kColumns);
      const int a_row = min(first >> p.log2_block_m, a_rows - 1);
      a_[row] = p.norm_a + (static_cast<int64_t>(tile.batch) * a_rows + a_row) * depth;
    }
  }

  __device__ StepNorms<Config> at(int step) const {
    StepNorms<Config> norms;
    const int k = step >> log2_block_k_;
#pragma unroll
    for (int row = 0; row < Config::kRows; ++row) norms.a[row] = a_[row][k];
#pragma unroll
    for (int column = 0; column < Config::kColumns; ++column) {
      norms.b[column] = b_[static_cast<int64_t>(k) * b_columns_ + b_column_[column]];
    }
    return norms;
  }

 private:
  const float* a_[Config::kRows];
  const float* b_;
  int log2_block_k_, b_columns_, b_column_[Config::kColumns];
};

// Fills lists; all lanes of the warp call it together.
template <class Config>
class ListWriter {
 public:
  __device__ explicit ListWriter(Storage<Config>& storage) : storage_(storage) {}

  // Waits until the list before the last is used up. Tiles are claimed after that and not earlier,
  // since claims far ahead unbalance the thread blocks.
  __device__ void wait_for_room() { storage_.list_empty[at_.slot].wait(at_.phase ^ 1); }

  // Each lane brings one step.
  __device__ void append(Tile tile, Step step) {
    if (count_ > Config::kListCapacity - 32) {
      publish({tile, count_, false, false});
      wait_for_room();
    }
    const uint32_t valid = __ballot_sync(~0u, step.mask != 0);
    const uint32_t before = valid & ((1u << (threadIdx.x % 32)) - 1);
    if (step.mask != 0) storage_.lists[at_.slot].steps[count_ + __popc(before)] = step;
    count_ += __popc(valid);
  }

  __device__ void end_tile(Tile tile) { publish({tile, count_, true, false}); }
  __device__ void end_work() { publish({{}, 0, false, true}); }

 private:
  struct Head {
    Tile tile;
    int count;
    bool ends_tile, ends_work;
  };

  __device__ void publish(Head head) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      auto& list = storage_.lists[at_.slot];
      list.tile = head.tile;
      list.count = head.count;
      list.ends_tile = head.ends_tile;
      list.ends_work = head.ends_work;
      storage_.list_full[at_.slot].arrive();
    }
    at_.advance();
    count_ = 0;
  }

  Storage<Config>& storage_;
  RingPosition<Config::kLists> at_;
  int count_ = 0;
};

// A tile that nobody has, or a number past the last one.
__device__ inline int claim_tile(const Params& p) {
  if (p.next_tile == nullptr) return p.tiles;
  int claimed = 0;
  if (threadIdx.x % 32 == 0) claimed = atomicAdd(p.next_tile, 1);
  return gridDim.x + __shfl_sync(~0u, claimed, 0);
}

// Tiles run down groups of tile rows, one column after the other, so that the tiles in flight share
// rows of A and columns of B in L2. A group's first column lies half a turn away from the diagonal:
// a decay matrix's heaviest tiles come in the middle, and its lightest are left to fill the end.
template <class Config>
__device__ Tile tile_at(const Params& p, int number) {
  const int batch = number / (p.tile_rows * p.tile_columns);
  const int in_batch = number - batch * p.tile_rows * p.tile_columns;
  const int first_row = in_batch / (p.group_rows * p.tile_columns) * p.group_rows;
  const int in_group = in_batch - first_row * p.tile_columns;
  const int rows = min(p.group_rows, p.tile_rows - first_row);
  const int column = in_group / rows, row = first_row + in_group - column * rows;
  const int diagonal = static_cast<int64_t>(first_row) * p.tile_columns / p.tile_rows;
  const int turned = (column + diagonal + p.tile_columns / 2) % p.tile_columns;
  return {batch, row * Config::kRows, turned * Config::kColumns};
}

template <class Config>
__device__ void list_steps(const Params& p, Storage<Config>& storage) {
  constexpr int kUnroll = 2;  // norms of 64 steps are in flight at a time
  const int lane = threadIdx.x % 32;
  const int steps = (p.product.k - 1) / kBlock + 1;
  const float tau = p.product.tau.value();
  ListWriter<Config> writer(storage);

  for (int number = blockIdx.x; number < p.tiles; number = claim_tile(p)) {
    const Tile tile = tile_at<Config>(p, number);
    const TileNorms<Config> norms(p.product, tile);
#pragma unroll 1
    for (int first = lane; first - lane < steps; first += 32 * kUnroll) {
      StepNorms<Config> step_norms[kUnroll];
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) step_norms[i] = norms.at(min(first + 32 * i, steps - 1));
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        const int step = first + 32 * i;
        writer.append(tile, {step, step < steps ? step_norms[i].mask(tau) & norms.inside : 0});
      }
    }
    writer.end_tile(tile);
    writer.wait_for_room();
  }
  writer.end_work();
}

}  // namespace spamm::kernels::sm90
