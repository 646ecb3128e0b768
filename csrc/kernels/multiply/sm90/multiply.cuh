// clang-format off
// C = alpha * (A B over valid blocks) + beta * input for Hopper (sm_90a): half types, float32 sums.
// Persistent thread blocks, tiles of kRows x kColumns blocks of C (128 x 256 is best), steps of 64.
// Roles:  list warps  claim tiles and list their valid steps: one bit for every block of C, or
//                     eight if a block edge is 32 (list.cuh)
//         load warps  fetch the operand blocks that some bit needs into the ring, by TMA (load.cuh)
//         warpgroups  multiply kOwn blocks of C each; TMA stores the result (epilogue.cuh)
// Skipping is exact for each block product. Sums run in the order of K: the same bits every time.
// Limits: operands as in kernels/multiply/params.h; M, N, K and the number of tiles below 2^31.
// Design, sources: docs/kernels/multiply.md. The list is cuSpAMM's map_offset, never in memory.
// clang-format on
#pragma once

#include <cute/arch/copy_sm90_desc.hpp>

#include "kernels/multiply/sm90/epilogue.cuh"
#include "kernels/multiply/sm90/load.cuh"

namespace spamm::kernels::multiply::sm90 {

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
      store<Config>(params, first_block(tile, row, column), storage.output.blocks[warpgroup], acc);
#pragma unroll
      for (float& value : acc) value = 0;
    }
  }
  if (threadIdx.x % 32 == 0) cute::tma_store_wait<0>();  // stores still read shared memory
}

}  // namespace spamm::kernels::multiply::sm90
