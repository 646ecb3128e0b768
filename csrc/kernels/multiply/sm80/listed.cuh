// Block-sparse products for sm_80 and newer: C = alpha * (A B over lists) + beta * input, where the
// blocks of a matrix lie one below the other (kernels/multiply/lists.h).
//
// A thread block computes one block of C, or a tile of one, by the pipeline of multiply.cuh. All of
// its sub-tiles have all listed products, so there are no masks. Sums run in the order of K: a
// block has the bits of dense storage.
#pragma once

#include "kernels/multiply/lists.h"
#include "kernels/multiply/sm80/multiply.cuh"

namespace spamm::kernels {

struct ListedProduct {
  int slot_a, slot_b, k;  // k: the block column of A
};

constexpr int kListedProducts = 256;  // in shared memory at a time

template <class Config>
struct ListedStorage {
  typename Config::Storage::Stage stages[Config::kStages];
  ListedProduct products[kListedProducts];
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerSm)
    multiply_listed_sm80(const __grid_constant__ typename Config::Params p,
                         const __grid_constant__ ProductLists lists) {
  extern __shared__ __align__(128) char shared[];
  auto& storage = *reinterpret_cast<ListedStorage<Config>*>(shared);
  constexpr int kStageDepth = Config::TileA::kDepth, kStagesPerStep = 32 / kStageDepth;
  constexpr int kAhead = Config::kStages - 1;
  constexpr uint32_t kWhole = (1u << Config::kTileM / 32 * (Config::kTileN / 32)) - 1;
  constexpr int64_t kEndless = int64_t{1} << 62;  // no operand ends within a block
  const int edge = 1 << p.log2_block_k, steps = edge / 32, per_product = steps * kStagesPerStep;
  const int across = edge / Config::kTileN, tiles = edge / Config::kTileM * across;
  const int64_t block = blockIdx.x / tiles;
  const int tile = static_cast<int>(blockIdx.x % tiles);
  const int row = tile / across * Config::kTileM, column = tile % across * Config::kTileN;
  const OperandStream<typename Config::TileA, Config::kThreads> a(p.a, 0, row, edge, kEndless);
  const OperandStream<typename Config::TileB, Config::kThreads> b(p.b, 0, column, edge, kEndless);
  const int64_t end = lists.first[block + 1];

  WarpProduct<Config> product;
  for (int64_t from = lists.first[block]; from < end; from += kListedProducts) {
    const int count = static_cast<int>(min(end - from, int64_t{kListedProducts}));
    for (int i = threadIdx.x; i < count; i += Config::kThreads) {
      const int slot_a = lists.slots_a[from + i];
      storage.products[i] = {slot_a, lists.slots_b[from + i], lists.col_a[slot_a]};
    }
    __syncthreads();
    const int stages = count * per_product;
    const auto begin_copies = [&](int s) {
      if (s < stages) {
        const ListedProduct& of = storage.products[s / per_product];
        const int depth = s % per_product * kStageDepth;
        auto& stage = storage.stages[s % Config::kStages];
        // A is contiguous along K, B across it: so a block begins at this place along K.
        a.copy(stage.a, int64_t{of.slot_a} * edge * edge + depth, ~0u);
        b.copy(stage.b, int64_t{of.slot_b} * edge + depth, ~0u);
      }
      commit_copies();  // an empty group at the end keeps wait_copies() counting right
    };
    for (int s = 0; s < kAhead; ++s) begin_copies(s);
    for (int s = 0; s < stages; ++s) {
      wait_copies<kAhead - 1>();
      __syncthreads();  // stage s has arrived for all threads, and all have read stage s - 1
      begin_copies(s + kAhead);
      if (s % kStagesPerStep == 0) {
        const int step = s % per_product / kStagesPerStep;
        product.begin_step(storage.products[s / per_product].k * steps + step);
      }
      product.multiply(storage.stages[s % Config::kStages], kWhole);
    }
    wait_copies<0>();
    __syncthreads();
  }
  product.store(Epilogue<Config>(p, 0, block * edge + row, column));
}

}  // namespace spamm::kernels

namespace spamm::kernels::sm80 {

// Computes p over lists, of blocks of 32 by a warp each.
template <class Engine, Tiles kTiles>
cudaError_t multiply_listed(const MultiplyParams<typename Engine::Sum>& p,
                            const ProductLists& lists, const Launch& how) {
  const auto run = [&]<class Shape>(Shape) {
    using Config = MultiplyConfig<Engine, Shape, /*kAKMajor=*/true, /*kBKMajor=*/false>;
    constexpr int kSharedBytes = sizeof(ListedStorage<Config>);
    const auto kernel = multiply_listed_sm80<Config>;
    const cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
    if (error != cudaSuccess) return error;
    const int64_t tiles = p.m / Config::kTileM * (p.n / Config::kTileN);
    return launch(kernel, static_cast<unsigned>(tiles), Config::kThreads, kSharedBytes,
                  /*overlap_previous=*/false, how.stream, p, lists);
  };
  if (p.n == 32) return run(TileShape<32, 32, 32, 32, 4, 8>());
  return p.n == 64 ? run(ShapeOf<kTiles.small>()) : run(ShapeOf<kTiles.large>());
}

}  // namespace spamm::kernels::sm80
