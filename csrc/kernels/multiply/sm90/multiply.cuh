// clang-format off
// C = alpha * (A B over valid blocks) + beta * input for Hopper (sm_90a): half types, float32 sums.
// Persistent thread blocks, tiles of kRows x kColumns blocks of C (128 x 256 is best), steps of 64.
// Roles:  list warps  claim tiles and list their valid steps: one bit for every block of C, or
//                     eight if a block edge is 32 (list.cuh)
//         load warps  fetch the operand blocks that some bit needs into the ring, by TMA (load.cuh)
//         warpgroups  multiply kOwn blocks of C each; TMA stores the result
// Skipping is exact for each block product. Sums run in the order of K: the same bits every time.
// Limits: operands as in kernels/multiply/params.h; M, N, K and the number of tiles below 2^31.
// Design, sources: docs/kernels/multiply.md. The list is cuSpAMM's map_offset, never in memory.
// clang-format on
#pragma once

#include <cute/arch/copy_sm90.hpp>
#include <cute/arch/copy_sm90_desc.hpp>
#include <cute/arch/copy_sm90_tma.hpp>

#include "kernels/common/numeric.cuh"
#include "kernels/multiply/sm90/listed.cuh"
#include "kernels/multiply/sm90/load.cuh"
#include "kernels/multiply/sm90/params.h"
#include "kernels/multiply/sm90/pipeline.cuh"

namespace spamm::kernels::multiply::sm90 {

// ---- Epilogue ----------------------------------------------------------------------------------

// Rounds alpha * sums + beta * input into shared memory, then stores it to C by TMA. A warpgroup
// stores its blocks one by one, and each warp its own rows.

constexpr int kWarpRows = kBlock / 4;  // rows of a block of C that belong to one warp

// A 64 x 64 block of C in shared memory, in TMA's 128-byte swizzle. Each warp owns 16 rows.
template <class Element>
struct StagedBlock {
  OperandBlock& memory;

  template <class T>
  __device__ T& at(int row, int column) const {
    const int chunk = column / 8 ^ row % 8;
    return *reinterpret_cast<T*>(memory.bytes + row * kLineBytes + chunk * 16 + column % 8 * 2);
  }
};

__device__ inline int warp_row() { return threadIdx.x % 128 / 32 * kWarpRows; }

// Calls visit(row, column) for the entries of the warp's rows that lie in C. The lanes visit 32
// neighbours at a time.
template <class Visit>
__device__ void for_own_entries(const MultiplyParams<float>& p, int64_t first_row,
                                int64_t first_column, const Visit& visit) {
#pragma unroll 1
  for (int i = threadIdx.x % 32; i < kWarpRows * kBlock; i += 32) {
    const int row = warp_row() + i / kBlock, column = i % kBlock;
    if (first_row + row < p.m && first_column + column < p.n) visit(row, column);
  }
}

// values += beta * input. The input may have any strides, so the warp first copies its rows of it
// into the staging block, which is free until the result is staged there.
template <class Element>
__device__ void add_input(const MultiplyParams<float>& p, int batch, int64_t first_row,
                          int64_t first_column, const StagedBlock<Element>& staged,
                          float (&values)[kThreadValues]) {
  const auto* input = static_cast<const Element*>(p.input) + batch * p.input_strides[0];
  for_own_entries(p, first_row, first_column, [&](int row, int column) {
    staged.template at<Element>(row, column) = input[(first_row + row) * p.input_strides[1] +
                                                     (first_column + column) * p.input_strides[2]];
  });
  __syncwarp();
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < kThreadValues; i += 2) {
    const int row = warp_row() + lane / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + lane % 4 * 2;
    const auto pair = staged.template at<EntryPair<Element>>(row, column);
    values[i] += p.beta * widen(pair.x);
    values[i + 1] += p.beta * widen(pair.y);
  }
  __syncwarp();
}

// Rounds the warp's values into the staging block, 16 rows x 16 columns with each instruction.
template <class Element>
__device__ void stage(const StagedBlock<Element>& staged, const float (&values)[kThreadValues]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < kThreadValues; i += 8) {
    uint32_t pairs[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const EntryPair<Element> pair{narrow<Element>(values[i + 2 * j]),
                                    narrow<Element>(values[i + 2 * j + 1])};
      pairs[j] = reinterpret_cast<const uint32_t&>(pair);
    }
    cute::SM90_U32x4_STSM_N::copy(
        pairs[0], pairs[1], pairs[2], pairs[3],
        staged.template at<cute::uint128_t>(warp_row() + lane % 16, i * 2 + lane / 16 * 8));
  }
}

// Stores the warp's 16 rows of kBlocks neighbouring blocks of C where TMA cannot, as many rows at a
// time as the warp has room for. Lanes write neighbouring words, and few rows end between the
// sectors of memory, because a part of one costs as much as several whole ones. values(block, i)
// gives the thread's sums.
template <class Element, int kBlocks, class Values>
__device__ __forceinline__ void store_rows(const MultiplyParams<float>& p, int batch, int row,
                                           int column, OperandBlock& staging,
                                           const Values& values) {
  constexpr int kColumns = kBlocks * kBlock, kRows = kWarpRows / kBlocks;
  uint8_t* const room = staging.bytes + warp_row() * kLineBytes;
  const auto at = [&](int i, int j) {  // the chunks of a row are permuted against bank conflicts
    return reinterpret_cast<uint16_t*>(room + i * kColumns * 2 + (j / 8 ^ i % 8) * 16 + j % 8 * 2);
  };
  const int columns = min(kColumns, static_cast<int>(p.n) - column);
  auto* to = static_cast<uint16_t*>(p.c) + batch * p.c_batch_stride +
             (row + warp_row()) * p.c_leading + column;
  int rows = static_cast<int>(p.m) - row - warp_row();
#pragma unroll
  for (int part = 0; part < kBlocks; ++part, rows -= kRows) {
    __syncwarp();
    int lane = threadIdx.x % 32;
    asm volatile("" : "+r"(lane));  // else addresses are kept for the next part, and spilled
#pragma unroll
    for (int i = 0; i < kThreadValues / 2; ++i) {
      const int block = i / 8 % kBlocks, below = i / 8 / kBlocks * 8;
      const int first = i % 8 * 4 + (part + below / 8) * 2;
      const EntryPair<Element> pair{narrow<Element>(values(block, first)),
                                    narrow<Element>(values(block, first + 1))};
      *reinterpret_cast<uint32_t*>(
          at(below + lane / 4, block * kBlock + i % 8 * 8 + lane % 4 * 2)) =
          reinterpret_cast<const uint32_t&>(pair);
    }
    __syncwarp();
#pragma unroll 2
    for (int i = 0; i < kRows; ++i, to += p.c_leading) {
      if (i >= rows) continue;
      const int head = reinterpret_cast<uintptr_t>(to) / 2 % 2;
#pragma unroll
      for (int j = 0; j < kColumns; j += 64) {
        const int word = j + lane * 2 + head;
        if (word + 1 < columns) {
          *reinterpret_cast<uint32_t*>(to + word) = *at(i, word) | *at(i, word + 1) << 16;
        }
      }
      // The entries before and after whole words.
      const bool is_odd = (lane == 0 ? head : columns - head) % 2 != 0;
      const int edge = lane == 0 ? 0 : columns - 1;
      if (lane < 2 && is_odd && columns > 0) to[edge] = *at(i, edge);
    }
  }
}

// Stores a warpgroup's blocks of C, from `first` on. Each warp stores only its own rows, so no warp
// waits for another.
template <class Config, bool kPlain, int kColumn = 0>
__device__ __forceinline__ void store_blocks(const Params& params, const OwnPart<Config>& first,
                                             OperandBlock& staging,
                                             const float (&acc)[Config::kOwn * kThreadValues]) {
  if constexpr (kColumn < Config::kOwn) {
    using Element = typename Config::Element;
    const MultiplyParams<float>& p = params.product;
    const bool leads = threadIdx.x % 32 == 0;
    const BlockPlace place = place_of(p, first, kColumn);
    if (!place.is_stored) {
      return store_blocks<Config, kPlain, kColumn + 1>(params, first, staging, acc);
    }
    const int batch = place.batch, row = place.row * kBlock, column = place.column * kBlock;
    const StagedBlock<Element> staged{staging};

    float values[kThreadValues];
#pragma unroll
    for (int i = 0; i < kThreadValues; ++i) values[i] = p.alpha * acc[kColumn * kThreadValues + i];
    if (leads) cute::tma_store_wait<0>();  // until the previous store has read shared memory
    __syncwarp();
    if (!kPlain && p.input != nullptr) add_input(p, batch, row, column, staged, values);
    if (kPlain || Config::kListed || params.c_by_tma) {
      stage(staged, values);
      cute::tma_store_fence();
      __syncwarp();
      if (leads) {
        cute::SM90_TMA_STORE_3D::copy(&params.map_c, staging.bytes + warp_row() * kLineBytes,
                                      column, row + warp_row(), batch);
        cute::tma_store_arrive();
      }
    } else {
      store_rows<Element, 1>(p, batch, row, column, staging, [&](int, int i) { return values[i]; });
    }
    store_blocks<Config, kPlain, kColumn + 1>(params, first, staging, acc);
  }
}

// Calls visit(row, column, x, y) for the pairs of kCount of a thread's sums, from kFirst on, of the
// blocks of C from `first` on.
template <int kFirst, int kCount, class Sums, class Visit>
__device__ __forceinline__ void for_pairs(Tile first, const Sums& sums, const Visit& visit) {
  int lane = threadIdx.x % 32;
  asm volatile("" : "+r"(lane));  // else addresses are found early, and spilled
  const int row = first.row * kBlock + warp_row() + lane / 4;
  const int column = first.column * kBlock + lane % 4 * 2;
#pragma unroll
  for (int i = 0; i < kCount; i += 2) {
    visit(row + i / 2 % 2 * 8, column + i / 4 * 8, sums.total(kFirst + i),
          sums.total(kFirst + i + 1));
  }
}

// The sums that a thread of half types holds.
struct PlainSums {
  const float* values;
  __device__ __forceinline__ float total(int i) const { return values[i]; }
};

// Stores the rows of a warpgroup's blocks of C, two blocks at a time, without an input.
template <class Config, int kColumn = 0>
__device__ __forceinline__ void store_all_rows(const MultiplyParams<float>& p, Tile first,
                                               OperandBlock& staging,
                                               const float (&acc)[Config::kOwn * kThreadValues]) {
  if constexpr (kColumn < Config::kOwn) {
    constexpr int kBlocks = Config::kOwn - kColumn == 1 ? 1 : 2;
    store_rows<typename Config::Element, kBlocks>(
        p, first.batch, first.row * kBlock, (first.column + kColumn) * kBlock, staging,
        [&](int block, int i) { return p.alpha * acc[(kColumn + block) * kThreadValues + i]; });
    store_all_rows<Config, kColumn + kBlocks>(p, first, staging, acc);
  }
}

// The usual case is an instance of its own, without the registers and branches of the other one.
template <class Config>
__device__ __forceinline__ void store(const Params& params, const OwnPart<Config>& first,
                                      OperandBlock& staging,
                                      const float (&acc)[Config::kOwn * kThreadValues]) {
  if (params.product.input == nullptr && params.c_by_tma) {
    return store_blocks<Config, true>(params, first, staging, acc);
  }
  if constexpr (!Config::kListed) {
    if (params.product.input == nullptr) {
      return store_all_rows<Config>(params.product, first, staging, acc);
    }
  }
  store_blocks<Config, false>(params, first, staging, acc);
}

template <Major kMajor>
__device__ __forceinline__ void load_block(const CUtensorMap& map, int line, int depth, int batch,
                                           Barrier& barrier, OperandBlock& block) {
  constexpr auto kHint = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);
  cute::SM90_TMA_LOAD_3D::copy(&map, reinterpret_cast<uint64_t*>(&barrier), kHint, &block,
                               kMajor == Major::K ? depth : line, kMajor == Major::K ? line : depth,
                               batch);
}

template <class Config, bool kIsA>
__device__ __forceinline__ void fetch(const Params& params, int batch, int block, int step, int i,
                                      Barrier& barrier, typename Config::Stage& stage) {
  if constexpr (kIsA) {
    load_block<Config::kMajorA>(params.map_a, block * kBlock, step * kBlock, batch, barrier,
                                stage.a[i]);
  } else {
    const RowOfB b = find_row_of_b(params, step * kBlock);
    load_block<Config::kMajorB>(b.map, block * kBlock, b.row, batch, barrier, stage.b[i]);
  }
}

// acc += a block of A times the kOwn blocks of B, for the columns [kColumn, kColumn + kWidth) of B
// and the depths [kDepth, kDepth + kDepths).
template <class Config, int kColumn, int kWidth, int kDepth, int kDepths, int kSize>
__device__ __forceinline__ void multiply_part(uint64_t a, uint64_t b, float (&acc)[kSize]) {
  cute::warpgroup_arrive();
  multiply_columns<typename Config::Element, Config::kMajorA, Config::kMajorB, kColumn, kWidth,
                   kDepth, kDepths>(a, b, acc);
  cute::warpgroup_commit_batch();
  cute::warpgroup_wait<0>();
}

// The same for one column of granules of the kOwn blocks of B, and only for the rows of granules
// whose bit in `rows` is set. An instruction computes 64 rows, but only 32 of them may be valid. So
// warps (16 rows each) whose rows are not valid restore their sums.
template <class Config, int kColumn, int kDepth, int kDepths, int kSize>
__device__ __forceinline__ void multiply_rows(uint32_t rows, uint64_t a, uint64_t b,
                                              float (&acc)[kSize]) {
  constexpr int kGranule = Config::kGranule, kValues = kGranule / 2;
  const auto multiply = [&] {
    multiply_part<Config, kColumn * kGranule, kGranule, kDepth, kDepths>(a, b, acc);
  };
  if (rows == (1u << Config::kGranules) - 1) {
    multiply();
  } else if (rows != 0) {
    float* const sums = acc + kColumn * kValues;
    float before[kValues];
    hand_over<kValues>(sums, before);
    multiply();
    const bool valid = rows >> (threadIdx.x % 128 / 64) & 1;
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      if (!valid) sums[i] = before[i];
    }
  }
}

// Adds the products of the granules whose bits are set, column by column. Each product is waited
// for, because ptxas serialises wgmma that stay in flight across branches. Depths that are valid
// for the same rows share one product.
template <class Config, int kColumn = 0, int kSize>
__device__ __forceinline__ void multiply_parts(uint32_t bits, uint64_t a, uint64_t b,
                                               float (&acc)[kSize]) {
  constexpr int kGranules = Config::kGranules, kGranule = Config::kGranule;
  if constexpr (kColumn < Config::kOwn * kGranules) {
    constexpr int kBit = kColumn / kGranules * Config::kBlockBits + kColumn % kGranules * kGranules;
    constexpr int kNextDepth = kGranules * kGranules;
    constexpr uint32_t kAllRows = (1u << kGranules) - 1;
    const auto rows_at = [&](int k) { return bits >> (kBit + k * kNextDepth) & kAllRows; };
    if (rows_at(0) == rows_at(kGranules - 1)) {
      multiply_rows<Config, kColumn, 0, kBlock>(rows_at(0), a, b, acc);
    } else {
      multiply_rows<Config, kColumn, 0, kGranule>(rows_at(0), a, b, acc);
      multiply_rows<Config, kColumn, kBlock - kGranule, kGranule>(rows_at(kGranules - 1), a, b,
                                                                  acc);
    }
    multiply_parts<Config, kColumn + 1>(bits, a, b, acc);
  }
}

// acc += a block of A times the kOwn blocks of B, valid granules only.
template <class Config, int kSize>
__device__ __forceinline__ void multiply_step(uint32_t bits, uint64_t a, uint64_t b,
                                              float (&acc)[kSize]) {
  if (bits == (1u << Config::kOwn * Config::kBlockBits) - 1) {
    float wide[kSize];
    hand_over<kSize>(acc, wide);
    multiply_part<Config, 0, Config::kOwn * kBlock, 0, kBlock>(a, b, wide);
    hand_over<kSize>(wide, acc);
  } else {
    multiply_parts<Config>(bits, a, b, acc);
  }
}

// `warpgroup` counts the multiplying warpgroups.
template <class Config>
__device__ void multiply_stages(const ParamsOf<Config, Params>& params, int warpgroup,
                                Storage<Config>& storage) {
  constexpr int kOwnBits = Config::kOwn * Config::kBlockBits;
  const int row = warpgroup * Config::kOwn / Config::kColumns;
  const int column = warpgroup * Config::kOwn % Config::kColumns;
  auto& ring = storage.ring;
  Descriptor<Config, Config::kMajorA> a(storage.stages[0].a[row]);
  Descriptor<Config, Config::kMajorB> b(storage.stages[0].b[column]);
  float acc[Config::kOwn * kThreadValues] = {};
  RingPosition<Config::kStages> at;
  while (true) {
    ring.full[at.slot].wait(at.phase);
    const auto& notice = ring.notices[at.slot];
    if (notice.ends_work()) break;
    const bool ends_tile = notice.ends_tile();
    multiply_step<Config>(notice.mask.bits(warpgroup * kOwnBits, kOwnBits), *a, *b, acc);
    const auto tile =
        ends_tile ? own_part<Config>(ring.tiles[at.slot], row, column) : OwnPart<Config>{};
    release(ring.empty[at.slot]);
    at.advance();
    a.advance(at.slot == 0);
    b.advance(at.slot == 0);
    if (ends_tile) {
      const auto first = first_block(tile, row, column);
      if constexpr (Config::kSegmented) {
        if (log2_segments<Config>(params) != 0) {
          const auto& p = params.product;
          for_pairs<0, kThreadValues>(first, PlainSums{acc}, [&](auto... pair) {
            store_pair<false>(p, first.batch, pair...);
          });
        } else {
          store<Config>(params, first, storage.output.blocks[warpgroup], acc);
        }
      } else {
        store<Config>(params, first, storage.output.blocks[warpgroup], acc);
      }
#pragma unroll
      for (float& value : acc) value = 0;
    }
  }
  if (threadIdx.x % 32 == 0) cute::tma_store_wait<0>();  // stores still read shared memory
}

}  // namespace spamm::kernels::multiply::sm90
