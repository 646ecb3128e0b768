// C = alpha * (A B over valid blocks) + beta * input for Hopper (sm_90a) at float32's accuracy:
// three float16 products of operands that split.cuh has cut into halves.
//
// With A = 2^i (a + a') and B = 2^j (b + b'), A B is 2^(i+j) (a b' + a' b + a b); a' b' is below
// float32's own rounding. Tensor cores truncate when they add, so the small products come first,
// and after each step of K, 64 deep, the sum goes with its power of two into float32 registers that
// round. The order of all sums is that of K, at fixed places: what other blocks hold, or whether
// they are skipped, does not change a block's share. Products that halves cannot carry (split.cuh)
// are made of the operands themselves by FFMA.
//
// Tile and pipeline are multiply_sm90.cuh's, but a stage holds both halves, each block comes with
// its header, and C leaves from registers: with float32 each store fills its sectors. Accuracy:
// relative to the block product's norms as float32 FFMA in the order of K, or better. Limits: M, N,
// K and the number of tiles below 2^31; block edges of 64 or 128 (blocks of 32 would share a power
// of two with their neighbours).
#pragma once

#include <cute/arch/copy_sm90_tma.hpp>

#include "list_sm90.cuh"
#include "load_sm90.cuh"
#include "numeric.cuh"
#include "split_params.h"

namespace spamm::kernels::sm90 {

struct SplitProduct : TiledProduct {
  SplitSource a, b;
};

template <Major kMajorA_, Major kMajorB_, int kRows_, int kColumns_, int kOwn_, int kStages_>
struct SplitConfig
    : Config<__half, kMajorA_, kMajorB_, kBlock, kRows_, kColumns_, kOwn_, kStages_> {
  struct Stage {
    OperandBlock a_high[kRows_], a_low[kRows_], b_high[kColumns_], b_low[kColumns_];
    SplitHeader a_header[kRows_], b_header[kColumns_];
  };
  static constexpr int kBytesPerBlock = kSplitBytesPerBlock;
  struct Output {};
};

template <class T>
__device__ __forceinline__ void fetch_bulk(const void* from, Barrier& barrier, T& to) {
  cute::SM90_BULK_COPY_G2S::copy(from, reinterpret_cast<uint64_t*>(&barrier), &to, sizeof(T));
}

// What the loader calls for block `i` of its side of a tile.
template <class Config, bool kIsA>
__device__ __forceinline__ void fetch(const SplitProduct& params, int batch, int block, int step,
                                      int i, Barrier& barrier, typename Config::Stage& stage) {
  const SplitOperand& x = (kIsA ? params.a : params.b).split;
  const int64_t number = (static_cast<int64_t>(batch) * x.extent + block) * x.depth + step;
  const SplitBlock& from = x.blocks[number];
  if constexpr (kIsA) {
    fetch_bulk(from.high, barrier, stage.a_high[i]);
    fetch_bulk(from.low, barrier, stage.a_low[i]);
    fetch_bulk(&x.headers[number], barrier, stage.a_header[i]);
  } else {
    fetch_bulk(from.high, barrier, stage.b_high[i]);
    fetch_bulk(from.low, barrier, stage.b_low[i]);
    fetch_bulk(&x.headers[number], barrier, stage.b_header[i]);
  }
}

__device__ inline bool needs_exact(const SplitHeader& a, const SplitHeader& b) {
  return ((a.kind | b.kind) & kSplitSpecial) | (a.kind & b.kind & kSplitWide);
}

// total += 2^exponent * sum, for a block of C: values from kTo and kFrom on.
template <int kTo, int kFrom, int kSums, int kTotals>
__device__ __forceinline__ void promote(float (&sum)[kSums], int exponent,
                                        float (&total)[kTotals]) {
  constexpr int kLeast = -126, kMost = 127;  // of float32's normal powers of two
  const int first = min(max(exponent, kLeast), kMost);
  if (first != exponent) {
    const float rest = power_of_two(min(max(exponent - first, kLeast), kMost));
#pragma unroll
    for (int i = 0; i < kThreadValues; ++i) sum[kFrom + i] *= rest;
  }
  const float scale = power_of_two(first);
#pragma unroll
  for (int i = 0; i < kThreadValues; ++i)
    total[kTo + i] = fmaf(sum[kFrom + i], scale, total[kTo + i]);
}

// sum = the three products of a block of A and kWidth columns, from kColumn on, of blocks of B, at
// these addresses in a stage.
template <class Config, int kColumn, int kWidth, int kSums>
__device__ __forceinline__ void multiply_halves(uint64_t a, uint64_t b, float (&sum)[kSums]) {
  constexpr uint32_t kBlockStep = sizeof(OperandBlock) / kDescriptorUnit;
  constexpr uint32_t kOffset = column_offset<Config::kMajorB>(kColumn);
  const uint64_t a_low = advance(a, Config::kRows * kBlockStep), b_high = advance(b, kOffset);
  const uint64_t b_low = advance(b, kOffset + Config::kColumns * kBlockStep);
  const auto multiply = [&](uint64_t x, uint64_t y, ScaleOut start) {
    multiply_columns<__half, Config::kMajorA, Config::kMajorB, 0, kWidth, 0, kBlock>(x, y, sum,
                                                                                     start);
  };
  cute::warpgroup_arrive();
  multiply(a, b_low, ScaleOut::Zero);
  multiply(a_low, b_high, ScaleOut::One);
  multiply(a, b_high, ScaleOut::One);
  cute::warpgroup_commit_batch();
  cute::warpgroup_wait<0>();
}

// total += the product of two blocks of the operands themselves, for one block of C.
template <class Config, int kColumn, int kTotals>
__device__ __forceinline__ void add_exact(const SplitProduct& params, const SplitHeader& a,
                                          const SplitHeader& b, float (&total)[kTotals]) {
  constexpr bool kAlongA = Config::kMajorA == Major::K, kAlongB = Config::kMajorB == Major::K;
  const int rows = kAlongA ? a.lines : a.length, depth = kAlongA ? a.length : a.lines;
  const int columns = kAlongB ? b.lines : b.length;
  const int lane = threadIdx.x % 32;
  const int row = threadIdx.x % 128 / 32 * 16 + lane / 4, column = lane % 4 * 2;
  const float* at_a = a.source + row * params.a.extent_stride;
  const float* at_b = b.source + column * params.b.extent_stride;
  float sum[kThreadValues] = {};
#pragma unroll 1
  for (int k = 0; k < depth; ++k) {
    const float x0 = row < rows ? at_a[0] : 0;
    const float x1 = row + 8 < rows ? at_a[8 * params.a.extent_stride] : 0;
#pragma unroll
    for (int i = 0; i < kThreadValues; i += 4) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int across = i * 2 + j;
        const float y = column + across < columns ? at_b[across * params.b.extent_stride] : 0;
        sum[i + j] = fmaf(x0, y, sum[i + j]);
        sum[i + 2 + j] = fmaf(x1, y, sum[i + 2 + j]);
      }
    }
    at_a += params.a.k_stride;
    at_b += params.b.k_stride;
  }
#pragma unroll
  for (int i = 0; i < kThreadValues; ++i) total[kColumn * kThreadValues + i] += sum[i];
}

// Block by block: those that are not multiplied together.
template <class Config, int kColumn = 0, int kTotals>
__device__ __forceinline__ void add_single(const SplitProduct& params, uint32_t bits, uint64_t a,
                                           uint64_t b, const SplitHeader& header_a,
                                           const SplitHeader* headers_b, float (&total)[kTotals]) {
  if constexpr (kColumn < Config::kOwn) {
    if (bits >> kColumn & 1) {
      const SplitHeader header_b = headers_b[kColumn];
      if (needs_exact(header_a, header_b)) {
        add_exact<Config, kColumn>(params, header_a, header_b, total);
      } else {
        float sum[kThreadValues];
        multiply_halves<Config, kColumn * kBlock, kBlock>(a, b, sum);
        promote<kColumn * kThreadValues, 0>(sum, header_a.exponent + header_b.exponent, total);
      }
    }
    add_single<Config, kColumn + 1>(params, bits, a, b, header_a, headers_b, total);
  }
}

template <int kColumn = 0, int kOwn, int kSize>
__device__ __forceinline__ void promote_all(float (&sum)[kSize], const int (&exponents)[kOwn],
                                            float (&total)[kSize]) {
  if constexpr (kColumn < kOwn) {
    promote<kColumn * kThreadValues, kColumn * kThreadValues>(sum, exponents[kColumn], total);
    promote_all<kColumn + 1>(sum, exponents, total);
  }
}

// total += a block of A times those of the kOwn blocks of B whose bits are set. Calls release()
// when the stage is done with: then the next one's products can begin before this one's are
// promoted.
template <class Config, int kTotals, class Release>
__device__ __forceinline__ void add_step(const SplitProduct& params, uint32_t bits, uint64_t a,
                                         uint64_t b, const SplitHeader& header_a,
                                         const SplitHeader* headers_b, float (&total)[kTotals],
                                         const Release& release) {
  bool together = bits == (1u << Config::kOwn) - 1;
  int exponents[Config::kOwn];
#pragma unroll
  for (int i = 0; i < Config::kOwn; ++i) {
    together &= !needs_exact(header_a, headers_b[i]);
    exponents[i] = header_a.exponent + headers_b[i].exponent;
  }
  if (together) {
    float sum[kTotals];
    multiply_halves<Config, 0, Config::kOwn * kBlock>(a, b, sum);
    release();
    promote_all(sum, exponents, total);
  } else {
    add_single<Config>(params, bits, a, b, header_a, headers_b, total);
    release();
  }
}

// Neighbours of a row of C, from `column` on. kPairs: both exist, 8 bytes aligned.
template <bool kPairs>
__device__ __forceinline__ void store_pair(const MultiplyParams<float>& p, int batch, int64_t row,
                                           int64_t column, float x, float y) {
  float* const to = static_cast<float*>(p.c) + (batch * p.m + row) * p.n + column;
  if constexpr (kPairs) {
    *reinterpret_cast<float2*>(to) = {p.alpha * x, p.alpha * y};
  } else {
    if (row >= p.m) return;
    const float values[2] = {x, y};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (column + i >= p.n) return;
      float value = p.alpha * values[i];
      if (p.input != nullptr) {
        value += p.beta * static_cast<const float*>(
                              p.input)[batch * p.input_strides[0] + row * p.input_strides[1] +
                                       (column + i) * p.input_strides[2]];
      }
      to[i] = value;
    }
  }
}

// Stores a warpgroup's blocks of C, of which `first` is the first.
template <bool kPairs, int kTotals>
__device__ __forceinline__ void store_totals(const MultiplyParams<float>& p, Tile first,
                                             const float (&total)[kTotals]) {
  const int lane = threadIdx.x % 32;
  const int64_t row = first.row * kBlock + threadIdx.x % 128 / 32 * 16 + lane / 4;
  const int64_t column = first.column * kBlock + lane % 4 * 2;
#pragma unroll
  for (int i = 0; i < kTotals; i += 2) {
    store_pair<kPairs>(p, first.batch, row + i / 2 % 2 * 8, column + i / 4 * 8, total[i],
                       total[i + 1]);
  }
}

// Warpgroup number `warpgroup` of those that multiply.
template <class Config>
__device__ void multiply_stages(const SplitProduct& params, int warpgroup,
                                Storage<Config>& storage) {
  constexpr uint32_t kStageStep = sizeof(storage.stages[0]) / kDescriptorUnit;
  const MultiplyParams<float>& p = params.product;
  const int row = warpgroup * Config::kOwn / Config::kColumns;
  const int column = warpgroup * Config::kOwn % Config::kColumns;
  uint64_t a = descriptor<Config::kMajorA>(storage.stages[0].a_high[row]);
  uint64_t b = descriptor<Config::kMajorB>(storage.stages[0].b_high[column]);
  float total[Config::kOwn * kThreadValues] = {};
  RingPosition<Config::kStages> at;
  while (true) {
    storage.full[at.slot].wait(at.phase);
    const auto& notice = storage.notices[at.slot];
    const End ends = notice.ends;
    if (ends == End::kWork) break;
    const uint32_t bits = notice.mask.bits(warpgroup * Config::kOwn, Config::kOwn);
    const bool ends_tile = ends == End::kTile;
    const Tile tile = ends_tile ? storage.tiles[at.slot] : Tile{};
    const auto release = [&] {
      // Warp by warp: where there is nothing to do, nothing else keeps a warpgroup together.
      __syncwarp();
      if (threadIdx.x % 32 == 0) storage.empty[at.slot].arrive();
    };
    if (bits != 0) {
      const auto& stage = storage.stages[at.slot];
      add_step<Config>(params, bits, a, b, stage.a_header[row], stage.b_header + column, total,
                       release);
    } else {
      release();
    }
    at.advance();
    const uint32_t onwards = at.slot == 0 ? 0u - (Config::kStages - 1) * kStageStep : kStageStep;
    a = advance(a, onwards);
    b = advance(b, onwards);
    if (ends_tile) {
      const Tile first{tile.batch, tile.row + row, tile.column + column};
      const bool whole = (first.row + 1) * kBlock <= p.m &&
                         (first.column + Config::kOwn) * kBlock <= p.n && p.n % 2 == 0;
      if (whole && p.input == nullptr) {
        store_totals<true>(p, first, total);
      } else {
        store_totals<false>(p, first, total);
      }
#pragma unroll
      for (float& value : total) value = 0;
    }
  }
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    multiply_split_sm90(const __grid_constant__ SplitProduct params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // the same build's other targets hold an empty kernel
  extern __shared__ __align__(1024) uint8_t shared[];
  auto& storage = *reinterpret_cast<Storage<Config>*>(shared);
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  const bool elected = threadIdx.x % 32 == 0;
  if (warp == 0 && elected) storage.initialize();
  __syncthreads();

  if (warp >= 4) {
    multiply_stages<Config>(params, warp / 4 - 1, storage);
  } else if (warp == 2) {
    list_steps<Config>(params, storage);
  } else if (warp == 1 && elected) {
    load_lists<Config, false>(params, storage);
  } else if (warp == 0 && elected) {
    load_lists<Config, true>(params, storage);
  }
#endif
}

}  // namespace spamm::kernels::sm90
