// C = alpha * (A B over valid blocks) + beta * input, for sm_80 and newer, all types and blocks.
// Design: docs/kernels/multiply.md.
//
// Tile: kTileM x kTileN of C for a thread block, kWarpM x kWarpN for each warp, in sub-tiles of
// 32 x 32. Every block edge is a multiple of 32, so a warp skips uniformly and exactly.
// Pipeline: list the valid steps of the tile, then load them with cp.async through
// kStages stages of 64 bytes of K. Sums run in the order of K: the same bits every time.
// Limits: operands as in kernels/multiply/params.h; K below 2^35.
// Source: bitmap, compact list and strided tiles are cuSpAMM's ("Accelerating Sparse Approximate
// Matrix Multiplication on GPUs"); the pipeline is the usual one of sm_80.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <functional>

#include "kernels/common/launch.cuh"
#include "kernels/common/numeric.cuh"
#include "kernels/common/skip_test.cuh"
#include "kernels/common/tile.h"
#include "kernels/multiply/params.h"
#include "kernels/multiply/sm80/stage.cuh"

namespace spamm::kernels {

// ---- The list of valid steps -------------------------------------------------------------------

// The list of the valid steps of a tile (the paper's bitmap and map_offset). All threads test steps
// in parallel and compact the valid ones, in order, into shared memory.
//
// A tile has kRows x kColumns sub-tiles of 32 x 32, and a step is 32 of K. Every block edge is a
// multiple of 32, so one bit says whether a step is valid for a sub-tile. The list has a fixed
// length: a long K is listed in several rounds.

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

  // Lists a segment's steps alone: its number modulo the number of segments.
  __device__ ValidList(int64_t depth, Storage& storage, int log2_segments = 0, int segment = 0)
      : storage_(storage),
        steps_(static_cast<int>((depth + kSubTile - 1) / kSubTile)),
        log2_segments_(log2_segments),
        segment_(segment) {}

  // Lists the next steps for which mask_of(step) is not 0 and returns their number, or 0 at the end
  // of K. All threads of the thread block call it together.
  template <class MaskOf>
  __device__ int fill(const MaskOf& mask_of) {
    int count = 0;
    const int own_steps = ((steps_ - 1) >> log2_segments_) + 1;
    for (; next_ < own_steps && count + kThreads <= kCapacity; next_ += kThreads) {
      const int step = ((next_ + static_cast<int>(threadIdx.x)) << log2_segments_) + segment_;
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
  int steps_, log2_segments_, segment_;
  int next_ = 0;  // the first of the segment's steps that is not yet tested
};

struct TileIndex {
  int batch, row, column;
};

// Tile rows form groups of kGroupRows. Within a group the order is column by column, so that tiles
// in flight at the same time share rows of A and columns of B in the L2 cache. No memory holds 2^31
// tiles, so their numbers fit an int.
template <int kGroupRows>
struct TileOrder {
  int rows, columns;  // of one batch, in tiles

  __device__ int per_batch() const { return rows * columns; }

  __device__ TileIndex operator[](int tile) const {
    const int batch = tile / per_batch(), in_batch = tile - batch * per_batch();
    const int group = in_batch / (kGroupRows * columns);
    const int in_group = in_batch - group * kGroupRows * columns;
    const int group_rows = min(kGroupRows, rows - group * kGroupRows);
    return {batch, group * kGroupRows + in_group % group_rows, in_group / group_rows};
  }
};

template <int kTileM_, int kTileN_, int kWarpM_, int kWarpN_, int kStages_, int kBlocksPerSm_>
struct TileShape {
  static constexpr int kTileM = kTileM_, kTileN = kTileN_, kWarpM = kWarpM_, kWarpN = kWarpN_;
  static constexpr int kStages = kStages_, kBlocksPerSm = kBlocksPerSm_;
  static constexpr int kWarpColumns = kTileN / kWarpN;
  static constexpr int kThreads = 32 * (kTileM / kWarpM) * kWarpColumns;
};

template <class Engine_, class Shape, bool kAKMajor, bool kBKMajor>
struct MultiplyConfig : Shape {
  using Engine = Engine_;
  using Element = typename Engine::Element;
  using Sum = typename Engine::Sum;
  using Params = MultiplyParams<Sum>;
  using TileA = StageTile<Element, Shape::kTileM, kAKMajor>;
  using TileB = StageTile<Element, Shape::kTileN, kBKMajor>;
  using List = ValidList<Shape::kTileM / 32, Shape::kTileN / 32, Shape::kThreads>;

  struct Storage {
    struct Stage {
      alignas(128) char a[TileA::kBytes];
      alignas(128) char b[TileB::kBytes];
    };
    Stage stages[Shape::kStages];
    typename List::Storage list;
  };
};

// Neighbouring entries that one thread stores together.
template <class Element, int kWidth>
struct alignas(kWidth * sizeof(Element) < 16 ? kWidth * sizeof(Element) : 16) Neighbours {
  Element entries[kWidth];
};

// Writes alpha * sum + beta * input for the tile of C that starts at (row, column).
template <class Config>
class Epilogue {
  using Element = typename Config::Element;
  using Sum = typename Config::Sum;

 public:
  __device__ Epilogue(const typename Config::Params& p, int64_t batch, int64_t row, int64_t column)
      : p_(p), row_(row), column_(column), batch_(batch) {}

  // True if there is no input, the whole tile lies in C, and rows start at multiples of 16 bytes.
  __device__ bool is_plain() const {
    return p_.input == nullptr && row_ + Config::kTileM <= p_.m &&
           column_ + Config::kTileN <= p_.n && p_.c_leading * sizeof(Element) % 16 == 0;
  }

  // Stores the sums of kWidth neighbouring columns that start at (i, j) of the tile.
  template <bool kPlain, int kWidth>
  __device__ void store(int i, int j, const Sum (&sums)[kWidth]) const {
    const int64_t row = row_ + i, column = column_ + j;
    Element* const to =
        static_cast<Element*>(p_.c) + batch_ * p_.c_batch_stride + row * p_.c_leading + column;
    if constexpr (kPlain) {
      Neighbours<Element, kWidth> result;
#pragma unroll
      for (int w = 0; w < kWidth; ++w) result.entries[w] = narrow<Element>(p_.alpha * sums[w]);
      *reinterpret_cast<Neighbours<Element, kWidth>*>(to) = result;
    } else {
      if (row >= p_.m) return;
#pragma unroll
      for (int w = 0; w < kWidth; ++w) {
        if (column + w < p_.n) to[w] = narrow<Element>(finish(row, column + w, sums[w]));
      }
    }
  }

 private:
  __device__ Sum finish(int64_t row, int64_t column, Sum sum) const {
    if (p_.input == nullptr) return p_.alpha * sum;
    const int64_t* strides = p_.input_strides;
    const Element added = static_cast<const Element*>(
        p_.input)[batch_ * strides[0] + row * strides[1] + column * strides[2]];
    return p_.alpha * sum + p_.beta * widen(added);
  }

  const typename Config::Params& p_;
  int64_t row_, column_, batch_;
};

// A warp's place in a tile, and the sums of its sub-tiles.
template <class Config>
class WarpProduct {
  using Engine = typename Config::Engine;
  using Storage = typename Config::Storage;
  static constexpr int kRows = Config::kWarpM / 32, kColumns = Config::kWarpN / 32;
  static constexpr int kTileColumns = Config::kTileN / 32;
  static constexpr uint32_t kAll = (1u << kRows * kColumns) - 1;

 public:
  // The shuffle tells the compiler that the value is uniform in the warp.
  __device__ explicit WarpProduct(int warp = __shfl_sync(~0u, threadIdx.x / 32, 0)) : warp_(warp) {}

  __device__ void multiply(const typename Storage::Stage& stage, uint32_t tile_mask) {
    const uint32_t mask = own_part(tile_mask);
    if (mask == kAll) {
      multiply<true>(stage, mask);
    } else if (kAll > 1 && mask != 0) {
      multiply<false>(stage, mask);
    }
  }

  // Must be called before the first stage of each step.
  __device__ void begin_step(int step) {
    Engine::begin_step(acc_, step, previous_step_);
    previous_step_ = step;
  }

  // `epilogue` has is_plain() and store(), like Epilogue.
  template <class Target>
  __device__ void store(const Target& epilogue) const {
    if (epilogue.is_plain()) {
      store<true>(epilogue);
    } else {
      store<false>(epilogue);
    }
  }

 private:
  template <bool kAllValid>
  __device__ void multiply(const typename Storage::Stage& stage, uint32_t mask) {
    Engine::template multiply_stage<kAllValid, typename Config::TileA, typename Config::TileB>(
        acc_, stage.a, stage.b, row_, column_, mask);
  }

  template <bool kPlain, class Target>
  __device__ void store(const Target& epilogue) const {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        Engine::template for_each<typename Config::TileA, typename Config::TileB>(
            acc_[r][c], [&](int i, int j, const auto& sums) {
              epilogue.template store<kPlain>(row_ + 32 * r + i, column_ + 32 * c + j, sums);
            });
      }
    }
  }

  // The bits of a tile's mask that belong to this warp.
  __device__ uint32_t own_part(uint32_t tile_mask) const {
    const uint32_t from_here = tile_mask >> (row_ / 32 * kTileColumns + column_ / 32);
    uint32_t mask = 0;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      mask |= (from_here >> r * kTileColumns & ((1u << kColumns) - 1)) << r * kColumns;
    }
    return mask;
  }

  int warp_;
  int row_ = warp_ / Config::kWarpColumns * Config::kWarpM;
  int column_ = warp_ % Config::kWarpColumns * Config::kWarpN;
  int previous_step_ = 0;
  typename Engine::SubTile acc_[kRows][kColumns];
};

// Calls copy(s, item) for each s below `count`, and kAhead turns later multiply(s, item), once the
// copies are there for all threads. item_of(s) is read before the wait, past the end as well. In
// the end nothing is copied or read any more.
template <int kAhead, class ItemOf, class Copy, class Multiply>
__device__ void run_pipeline(int count, const ItemOf& item_of, const Copy& copy,
                             const Multiply& multiply) {
  const auto begin_copies = [&](int s, const auto& item) {
    if (s < count) copy(s, item);
    commit_copies();  // an empty group at the end keeps wait_copies() counting right
  };

  for (int s = 0; s < kAhead; ++s) begin_copies(s, item_of(s));
  for (int s = 0; s < count; ++s) {
    const auto item = item_of(s), item_ahead = item_of(s + kAhead);
    wait_copies<kAhead - 1>();
    __syncthreads();  // s has arrived for all threads, and all have read s - 1
    begin_copies(s + kAhead, item_ahead);
    multiply(s, item);
  }
  wait_copies<0>();
  __syncthreads();
}

// Adds the products of the `count` listed steps. The streams have the copy() of OperandStream; the
// convolution passes one that gathers im2col rows.
template <class Config, class StreamA, class StreamB>
__device__ void multiply_list(const typename Config::List& list, int count,
                              typename Config::Storage& storage, const StreamA& a, const StreamB& b,
                              WarpProduct<Config>& product) {
  constexpr int kStageDepth = Config::TileA::kDepth, kStagesPerStep = 32 / kStageDepth;
  const int stages = count * kStagesPerStep;
  run_pipeline<Config::kStages - 1>(
      stages, [&](int s) { return list[min(s, stages - 1) / kStagesPerStep]; },
      [&](int s, const auto& entry) {
        const int64_t k = static_cast<int64_t>(entry.step) * 32 + s % kStagesPerStep * kStageDepth;
        auto& stage = storage.stages[s % Config::kStages];
        a.copy(stage.a, k, entry.rows());
        b.copy(stage.b, k, entry.columns());
      },
      [&](int s, const auto& entry) {
        if (s % kStagesPerStep == 0) product.begin_step(entry.step);
        product.multiply(storage.stages[s % Config::kStages], entry.mask());
      });
}

// Loops over the tiles of a thread block, or the segments of tiles, at a stride of the grid.
template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerSm)
    multiply_sm80(const __grid_constant__ typename Config::Params p) {
  extern __shared__ __align__(128) char shared[];
  auto& storage = *reinterpret_cast<typename Config::Storage*>(shared);
  const typename Config::Sum tau = p.tau.value();
  const TileOrder<16> order{static_cast<int>((p.m - 1) / Config::kTileM + 1),
                            static_cast<int>((p.n - 1) / Config::kTileN + 1)};
  const int log2_segments = p.log2_segments;
  const int tiles = order.per_batch() * static_cast<int>(p.batch) << log2_segments;

  for (int number = blockIdx.x; number < tiles; number += gridDim.x) {
    const auto [batch, tile_row, tile_column] = order[number >> log2_segments];
    const int segment = number & ((1 << log2_segments) - 1);
    const int64_t row = static_cast<int64_t>(tile_row) * Config::kTileM;
    const int64_t column = static_cast<int64_t>(tile_column) * Config::kTileN;
    const OperandStream<typename Config::TileA, Config::kThreads, true> a(p.a, batch, row, p.m,
                                                                          p.k);
    const OperandStream<typename Config::TileB, Config::kThreads, true> b(p.b, batch, column, p.n,
                                                                          p.k);
    WarpProduct<Config> product;
    typename Config::List list(p.k, storage.list, log2_segments, segment);
    constexpr int kRows = Config::kTileM / 32, kColumns = Config::kTileN / 32;
    const auto mask_of = [&](int step) {
      return valid_mask<kRows, kColumns>(p, tau, batch, tile_row * kRows, tile_column * kColumns,
                                         step);
    };
    while (const int count = list.fill(mask_of)) {
      multiply_list<Config>(list, count, storage, a, b, product);
    }
    const int64_t matrix = (static_cast<int64_t>(batch) << log2_segments) + segment;
    product.store(Epilogue<Config>(p, matrix, row, column));
  }
}

// ---- Block-sparse products ----------------------------------------------------------------------

// C = alpha * (A B over lists) + beta * input, where the blocks of a matrix lie one below the other
// (kernels/multiply/params.h). A thread block computes one block of C, or a tile of one. All of its
// sub-tiles have all listed products, so there are no masks. Sums run in the order of K: a block
// has the bits of dense storage.

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
    run_pipeline<Config::kStages - 1>(
        count * per_product, std::identity(),
        [&](int s, int) {
          const ListedProduct& of = storage.products[s / per_product];
          const int depth = s % per_product * kStageDepth;
          auto& stage = storage.stages[s % Config::kStages];
          // A is contiguous along K, B across it: so a block begins at this place along K.
          a.copy(stage.a, int64_t{of.slot_a} * edge * edge + depth, ~0u);
          b.copy(stage.b, int64_t{of.slot_b} * edge + depth, ~0u);
        },
        [&](int s, int) {
          if (s % kStagesPerStep == 0) {
            const int step = s % per_product / kStagesPerStep;
            product.begin_step(storage.products[s / per_product].k * steps + step);
          }
          product.multiply(storage.stages[s % Config::kStages], kWhole);
        });
  }
  product.store(Epilogue<Config>(p, 0, block * edge + row, column));
}

}  // namespace spamm::kernels

namespace spamm::kernels::sm80 {

template <TileConfig kTile>
using ShapeOf = TileShape<kTile.rows, kTile.columns, kTile.warp_rows, kTile.warp_columns,
                          kTile.stages, kTile.blocks_per_multiprocessor>;

// Starts a thread block for each tile, but no more than the chip can hold at a time.
template <class Config, class Params>
cudaError_t start(void (*kernel)(Params), const Params& params, int64_t tiles, const Launch& how) {
  constexpr int kSharedBytes = sizeof(typename Config::Storage);
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (error != cudaSuccess) return error;
  const int64_t resident = int64_t{how.multiprocessors} * Config::kBlocksPerSm;
  return launch(kernel, static_cast<unsigned>(std::min(tiles, resident)), Config::kThreads,
                kSharedBytes, /*overlap_previous=*/false, how.stream, params);
}

// Computes p. Returns the error of the driver or of the launch, as all launchers do.
template <class Engine, Tiles kTiles>
cudaError_t multiply(const MultiplyParams<typename Engine::Sum>& p, const Launch& how) {
  const auto run = [&]<bool kAlongA, bool kAlongB, bool kLarge>(std::bool_constant<kAlongA>,
                                                                std::bool_constant<kAlongB>,
                                                                std::bool_constant<kLarge>) {
    using Shape = ShapeOf<kLarge ? kTiles.large : kTiles.small>;
    using Config = MultiplyConfig<Engine, Shape, kAlongA, kAlongB>;
    MultiplyParams<typename Engine::Sum> params = p;
    params.log2_segments = how.segments.log2_segments;
    const int64_t tiles =
        p.batch * ((p.m - 1) / Config::kTileM + 1) * ((p.n - 1) / Config::kTileN + 1);
    return start<Config>(multiply_sm80<Config>, params, tiles << params.log2_segments, how);
  };
  return with_constants(run, p.a.k_major, p.b.k_major, how.tile == TileSize::kLarge);
}

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
