// A stage of the split multiply: its parameters, the bulk copies of split blocks into shared memory
// and the exact products for granules that split parts cannot represent.
#pragma once

#include <cutlass/arch/memory.h>

#include <cute/arch/copy_sm90_tma.hpp>

#include "kernels/multiply/sm90/list.cuh"
#include "kernels/multiply/sm90/params.h"
#include "kernels/multiply/sm90/pipeline.cuh"
#include "kernels/multiply/sm90/split/largest_terms.cuh"
#include "kernels/multiply/sm90/split/three_parts.cuh"
#include "kernels/norm_map/params.h"

namespace spamm::kernels::multiply::sm90 {

struct SplitProduct : TiledProduct<float> {
  SplitSource a, b;
  const int16_t* terms;  // of each granule of C: largest_terms.cuh
};

// kSplitParts: 2 (high and low) or 1 (high alone).
template <int kSplitParts_, int kGranule_, int kRows_, int kColumns_, int kOwn_, int kStages_>
struct SplitConfig
    : Config<__half, Major::K, Major::MN, kGranule_, kRows_, kColumns_, kOwn_, kStages_> {
  using Header = SplitHeaderOf<kBlock / kGranule_>;
  static constexpr int kSplitParts = kSplitParts_, kLastWidth = kBlock;
  struct Stage {
    OperandBlock a[kSplitParts_][kRows_], b[kSplitParts_][kColumns_];
    Header a_header[kRows_], b_header[kColumns_];
  };
  static constexpr int kBytesPerBlock = sizeof(SplitBlock<kSplitParts_>) + sizeof(Header);
  // Granules of 32 multiply every pair at once. With lists, ptxas keeps the descriptors of their
  // many kinds of products in vector registers, which costs all data 15%.
  static constexpr bool kKeepsPairs = kSplitParts_ == 2 && kGranule_ == kBlock;
  using Later = std::conditional_t<kKeepsPairs, LaterPairs<kOwn_>, NothingLater>;
  struct Output {
    typename Later::Room later[kRows_ * kColumns_ / kOwn_ * 4];  // of each multiplying warp
    StoreRoom<float> rooms[kRows_ * kColumns_ / kOwn_ * 4];      // the same
  };
  // For PromotedSums. The small tile has registers for more sets. It also needs them to match
  // cublasSgemm, which is more accurate for a small C because it cuts K into parts.
  static constexpr int kSets = kOwn_ == 1 ? 4 : 2;
  static constexpr bool kKeepsRests = kOwn_ == 1;
  static constexpr bool kTakesTurns = kSplitParts_ == 2;
  static constexpr bool kNamesTiles = true;  // to find the tile's largest terms
  // Registers are moved to the multiplying threads. 640 threads start with 96 each, 384 with 168.
  static constexpr bool kMovesRegisters = kSplitParts_ == 2 || kOwn_ == 2;
  static constexpr int kMultiplyRegisters = !kMovesRegisters    ? 0
                                            : kKeepsPairs       ? 224
                                            : kSplitParts_ == 2 ? 216
                                                                : 104;
  static constexpr int kOtherRegisters = kKeepsPairs ? 56 : kSplitParts_ == 2 ? 72 : 64;
  static constexpr auto kNextKernel = NextKernel::kAfterTheEnd;
  // A power of two, times tau, that counts as a term of C: see needs_exact(). Then a product of
  // granules loses less than tau / 1000, in the Frobenius norm, where skipping it may lose tau.
  static constexpr int kTermsOverTau = kSplitParts == 2 ? 2 : -13;
  static constexpr int kExactDepths = kKeepsPairs ? 1 : 2;  // unrolled by add_exact()
};

template <class T>
__device__ __forceinline__ void fetch_bulk(const void* from, Barrier& barrier, T& to) {
  cute::SM90_BULK_COPY_G2S::copy(from, reinterpret_cast<uint64_t*>(&barrier), &to, sizeof(T));
}

template <class Config, bool kIsA>
__device__ __forceinline__ void fetch(const SplitProduct& params, int batch, int block, int step,
                                      int i, Barrier& barrier, typename Config::Stage& stage) {
  const SplitOperand& x = (kIsA ? params.a : params.b).split;
  const int64_t number = (static_cast<int64_t>(batch) * x.extent + block) * x.depth + step;
  const auto& from = static_cast<const SplitBlock<Config::kSplitParts>*>(x.blocks)[number];
  const auto fetch_into = [&](auto& split_parts, typename Config::Header* headers) {
#pragma unroll
    for (int part = 0; part < Config::kSplitParts; ++part)
      fetch_bulk(from.parts[part], barrier, split_parts[part][i]);
    fetch_bulk(&x.header<Config::kGranules>(number), barrier, headers[i]);
  };
  if constexpr (kIsA) {
    fetch_into(stage.a, stage.a_header);
  } else {
    fetch_into(stage.b, stage.b_header);
  }
}

// The largest terms of the granules of C that a warpgroup computes, as powers of two.
template <class Config>
class GridTerms {
 public:
  static constexpr SplitKind kBesideFaint = kSplitWide;  // what a faint granule may lose beside

  // `row` and `column` are the warpgroup's first block in the tile.
  __device__ GridTerms(const SplitProduct& p, const Tile& tile, int row, int column)
      : p_(p), tile_(tile), row_(row), column_(column) {}

  // Reads the tile now: few products ask, and the others have no time and registers for it.
  __device__ int at(int row, int column) const {
    const int columns = p_.b.split.extent * Config::kGranules;
    const int64_t rows_before =
        static_cast<int64_t>(batch_of<Config>(p_, tile_)) * p_.a.split.extent;
    const int64_t rows = (rows_before + tile_.row + row_) * Config::kGranules + row;
    return p_.terms[rows * columns + (tile_.column + column_) * Config::kGranules + column];
  }

 private:
  const SplitProduct& p_;
  const Tile& tile_;
  int row_, column_;
};

// The same of cells, whose granules follow each other.
template <class Config>
class CellTerms {
  static constexpr int kGranules = Config::kGranules;

 public:
  static constexpr SplitKind kBesideFaint = kSplitWide;

  __device__ CellTerms(const SplitProduct& p, const CellTile<Config>& tile, int row, int column)
      : terms_(p.terms), cells_(tile.cells + row * Config::kColumns + column) {}

  __device__ int at(int row, int column) const {
    const int64_t rows = int64_t{cells_[column / kGranules]} * kGranules + row;
    return terms_[rows * kGranules + column % kGranules];
  }

 private:
  const int16_t* terms_;
  const int* cells_;
};

template <class Config>
using LargestTerms = std::conditional_t<Config::kListed, CellTerms<Config>, GridTerms<Config>>;

// For tiles of which no product needs_exact().
struct PlainTerms {};

// The steps of such tiles are marked, if blocks are granules.
template <class Config>
__device__ bool is_marked(const SplitProduct& p, Tile tile) {
  return Config::kGranules == 1 && LargestTerms<Config>(p, tile, 0, 0).at(0, 0) == kPlainTerms;
}
template <class Config>
__device__ bool is_marked(const SplitProduct& p, const CellTile<Config>& tile) {
  bool plain = Config::kGranules == 1;
  if constexpr (Config::kGranules == 1) {
#pragma unroll
    for (const int cell : tile.cells) plain &= cell < 0 || p.terms[cell] == kPlainTerms;
  }
  return plain;
}

// Two granules, and the granule of C to which their product belongs.
template <class Header>
struct GranulePair {
  const Header &a, &b;
  int row, column, k;  // `column` counts the granules of all blocks of the warpgroup

  __device__ int kinds_a() const { return a.kinds(row, k); }
  __device__ int kinds_b() const { return b.kinds(column % Header::kGranules, k); }
  __device__ int exponent() const {
    return a.exponent(row, k) + b.exponent(column % Header::kGranules, k);
  }
};

// The granules of block `column` of the warpgroup, if a block is a granule.
__device__ __forceinline__ GranulePair<SplitHeader> whole_blocks(const SplitHeader& a,
                                                                 const SplitHeader& b, int column) {
  return {a, b, 0, column, 0};
}

// Tells whether split parts cannot represent the product of two granules (norm_map/split.cuh). For
// each k they lose at most 2^-38 of the product of the granules' largest entries, or 2^-35 with one
// part. That does no harm if it also lies below what rounding the largest term of C's granule
// loses. A faint granule loses digits; where the other one is wide, it may be small or 0 where the
// faint one is large. The term is read only where the answer depends on it.
template <int kSplitParts, class Header, class Terms>
__device__ __forceinline__ bool needs_exact(const GranulePair<Header>& pair, const Terms& terms) {
  // Digits of a product of split parts: 23, or 11 of a single part. The rest is for sums of losses.
  constexpr int kHarmless = 2 * kSplitBits - (kSplitParts == 2 ? 12 : 24);
  const auto both = [](int faint, int other) {
    return (faint & kSplitFaint) != 0 && (other & Terms::kBesideFaint) != 0;
  };
  const int a = pair.kinds_a(), b = pair.kinds_b();
  if (((a | b) & kSplitSpecial) != 0) return true;
  return (both(a, b) || both(b, a)) &&
         pair.exponent() + kHarmless > terms.at(pair.row, pair.column);
}

template <int kSplitParts, class Header>
__device__ __forceinline__ bool needs_exact(const GranulePair<Header>&, PlainTerms) {
  return false;
}

// A pair of blocks in the original operands.
__device__ __forceinline__ OperandPair operand_pair(const SplitHeader& a, const SplitHeader& b) {
  return {a.source, b.source, a.extent, b.extent, a.depth};
}

template <class Params>
__device__ __forceinline__ OperandStrides operand_strides(const Params& params) {
  return {static_cast<int>(params.a.extent_stride), static_cast<int>(params.a.k_stride),
          static_cast<int>(params.b.extent_stride), static_cast<int>(params.b.k_stride)};
}

template <class Params>
__device__ __forceinline__ bool strides_are_short(const Params& params) {
  return max(max(params.a.extent_stride, params.a.k_stride),
             max(params.b.extent_stride, params.b.k_stride)) <= kLongestSplitStride;
}

// Keeps a pair that needs_exact() for later, if three bfloat16 parts can represent it: they hold
// neither infinities nor NaNs, they end at 2^-133, and where sums may overflow, they could make a
// NaN of an infinity. Otherwise returns false.
template <class Config, class Params>
__device__ __forceinline__ bool keep_for_later(const Params& params,
                                               const GranulePair<SplitHeader>& pair,
                                               typename Config::Later& later) {
  if constexpr (std::is_same_v<typename Config::Later, NothingLater>) {
    return false;
  } else {
    constexpr int kMostExponent = 127 - 2 * (kSplitBits + 1) - 6;  // 64 products below 2^127
    if (((pair.kinds_a() | pair.kinds_b()) & (kSplitSpecial | kSplitTiny)) != 0) return false;
    if (pair.exponent() > kMostExponent || !strides_are_short(params)) return false;
    later.keep(pair.column, operand_pair(pair.a, pair.b));
    return true;
  }
}

// Adds the product of two blocks of the original operands to kCount values of `sum`, from kFirst
// on, by FFMA. These are the values kValue, ... of a thread's share of a block; of K, depths
// [kDepth, kDepth + kDepths) count. Params have the sources a and b.
//
// The operands come through the L1 cache. No load waits behind a branch, so that many are in
// flight.
template <class Config, int kFirst, int kCount, int kValue = 0, int kDepth = 0,
          int kDepths = kSplitBlock, class Params, class Header, int kSums>
__device__ __forceinline__ void add_exact(const Params& params, const Header& a, const Header& b,
                                          float (&sum)[kSums]) {
  const auto load = [](const float* from, bool inside) {
    float value = 0;
    cutlass::arch::global_load<float, sizeof(float)>(value, from, inside);
    return value;
  };
  int thread = threadIdx.x % 128;
  asm volatile("" : "+r"(thread));  // else addresses are kept for the next call, and spilled
  const int row = thread / 32 * 16 + thread % 32 / 4;
  const int column = thread % 4 * 2 + kValue / 4 * 8;
  // Those inside the operand from here on.
  const int rows = a.extent - row, columns = b.extent - column;
  const int64_t stride_a = params.a.extent_stride, stride_b = params.b.extent_stride;
  const float* at_a = a.source + row * stride_a + kDepth * params.a.k_stride;
  const float* at_b = b.source + column * stride_b + kDepth * params.b.k_stride;
  // One of the blocks may be padded with zeros beyond its operand.
  const int inside = min(a.depth, b.depth);
#pragma unroll Config::kExactDepths
  for (int k = min(inside - kDepth, kDepths); k > 0; --k) {
    const float x[2] = {load(at_a, rows > 0), load(at_a + 8 * stride_a, rows > 8)};
    const float* from = at_b;
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      const float y[2] = {load(from, columns > i * 2), load(from + stride_b, columns > i * 2 + 1)};
#pragma unroll
      for (int j = 0; j < 4; ++j)
        sum[kFirst + i + j] = fmaf(x[j / 2], y[j % 2], sum[kFirst + i + j]);
      from += 8 * stride_b;
    }
    at_a += params.a.k_stride;
    at_b += params.b.k_stride;
  }
}

}  // namespace spamm::kernels::multiply::sm90
