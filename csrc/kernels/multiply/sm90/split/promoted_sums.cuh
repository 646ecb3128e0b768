// Sums of float32's accuracy from operands in two split parts each. With A = 2^i (high + low) and
// B = 2^j (high' + low'), A B is 2^(i+j) (high low' + low high' + high high'). Tensor cores
// truncate when they add, so the small products come first, and after each step the sums are
// promoted: they are added to float32 totals that round. Derivation:
// docs/kernels/multiply.md.
//
// Config has kMajorA, kMajorB, kRows, kColumns and kOwn; kLastWidth, the columns of a warpgroup's
// last block, a multiple of 8; kSets, the sets of sums of a step (1, 2 or 4); kKeepsRests; and
// Later (three_parts.cuh). In a stage each operand has the high parts of all its blocks before the
// low parts.
#pragma once

#include "kernels/common/numeric.cuh"
#include "kernels/multiply/sm90/split/stage.cuh"

namespace spamm::kernels::multiply::sm90 {

// The number of sums that a thread holds of block `column` of its warpgroup.
template <class Config>
constexpr int values_of(int column) {
  return column == Config::kOwn - 1 ? Config::kLastWidth * kThreadValues / kBlock : kThreadValues;
}

// The sums of one step. Each set holds an equal part of the step's K.
template <class Config, int kSize>
using StepSums = float[Config::kSets][kSize];

// Sums in float32 over all steps.
template <int kSize, bool kKeepsRests>
struct Totals {
  float values[kSize] = {};
  float rests[kKeepsRests ? kSize : 1] = {};  // the rounding errors of `values` so far

  // values[i] += sum * scale. `scale` is a power of two.
  __device__ __forceinline__ void add(int i, float sum, float scale) {
    const float before = values[i];
    values[i] = fmaf(sum, scale, before);
    // The rounding error (Fast2Sum). Exact unless |sum * scale| is larger than |before|.
    if constexpr (kKeepsRests) rests[i] += fmaf(sum, scale, before - values[i]);
  }

  __device__ __forceinline__ float total(int i) const {
    if constexpr (kKeepsRests) {
      // The rest of an infinite value is NaN or infinite and must not be added.
      const float all = values[i] + rests[i];
      if (isfinite(all)) return all;
    }
    return values[i];
  }
};

// totals += 2^exponent * sums, for kCount values of a block: from kTo in `totals`, kFrom in `sums`.
template <int kCount, int kTo, int kFrom, int kSets, int kSize, class Totals>
__device__ __forceinline__ void promote(float (&sums)[kSets][kSize], int exponent, Totals& totals) {
#pragma unroll
  for (int i = kFrom; i < kFrom + kCount; ++i) {
    if constexpr (kSets == 2) sums[0][i] += sums[1][i];
    if constexpr (kSets == 4) sums[0][i] = sums[0][i] + sums[1][i] + (sums[2][i] + sums[3][i]);
  }
  float(&sum)[kSize] = sums[0];
  const int first = normal_exponent(exponent);
  if (first != exponent) {
    const float rest = power_of_two(normal_exponent(exponent - first));
#pragma unroll
    for (int i = 0; i < kCount; ++i) sum[kFrom + i] *= rest;
  }
  const float scale = power_of_two(first);
#pragma unroll
  for (int i = 0; i < kCount; ++i) totals.add(kTo + i, sum[kFrom + i], scale);
}

// Issues the products of the split parts of a block of A and of kWidth columns of B, from kColumn
// on, over kDepths of K from kDepth on: the small ones first. `a` and `b` are descriptors of the
// high parts. The caller arrives, commits and waits.
template <class Config, int kColumn, int kWidth, int kDepth, int kDepths, int kSets, int kSize>
__device__ __forceinline__ void multiply_split_parts(uint64_t a, uint64_t b,
                                                     float (&sums)[kSets][kSize]) {
  constexpr uint32_t kBlockStep = sizeof(OperandBlock) / kDescriptorUnit;
  constexpr uint32_t kOffset = column_offset<Config::kMajorB>(kColumn);
  const uint64_t a_low = advance(a, Config::kRows * kBlockStep), b_high = advance(b, kOffset);
  const uint64_t b_low = advance(b, kOffset + Config::kColumns * kBlockStep);
  const auto multiply = [&]<int kSet, int kParts>(uint64_t x, uint64_t y, ScaleOut start) {
    constexpr int kPart = kDepths / kParts;
    multiply_columns<__half, Config::kMajorA, Config::kMajorB, 0, kWidth, kDepth + kSet * kPart,
                     kPart>(x, y, sums[kSet], start);
  };
  multiply.template operator()<0, 1>(a, b_low, ScaleOut::Zero);
  multiply.template operator()<0, 1>(a_low, b_high, ScaleOut::One);
  [&]<int... kSet>(std::integer_sequence<int, kSet...>) {
    (multiply.template operator()<kSet, kSets>(a, b_high,
                                               kSet == 0 ? ScaleOut::One : ScaleOut::Zero),
     ...);
  }
  (std::make_integer_sequence<int, kSets>{});
}

// Multiplies block by block, for a step that is not valid for all blocks or needs exact products.
template <class Config, int kColumn = 0, class Params, class Terms, class Totals>
__device__ __forceinline__ void add_single(const Params& params, uint32_t bits, uint64_t a,
                                           uint64_t b, const SplitHeader& header_a,
                                           const SplitHeader* headers_b, const Terms& terms,
                                           typename Config::Later& later, Totals& totals) {
  if constexpr (kColumn < Config::kOwn) {
    constexpr int kValues = values_of<Config>(kColumn);
    if (bits >> kColumn & 1) {
      const SplitHeader header_b = headers_b[kColumn];
      const auto pair = whole_blocks(header_a, header_b, kColumn);
      if (needs_exact<Config::kSplitParts>(pair, terms)) {
        if (!keep_for_later<Config>(params, pair, later)) {
          float sum[1][kValues] = {};
          add_exact<Config, 0, kValues>(params, header_a, header_b, sum[0]);
          promote<kValues, kColumn * kThreadValues, 0>(sum, 0, totals);
        }
      } else {
        StepSums<Config, kThreadValues> sums;
        cute::warpgroup_arrive();
        multiply_split_parts<Config, kColumn * kBlock, kBlock, 0, kBlock>(a, b, sums);
        cute::warpgroup_commit_batch();
        cute::warpgroup_wait<0>();
        promote<kValues, kColumn * kThreadValues, 0>(sums, pair.exponent(), totals);
      }
    }
    add_single<Config, kColumn + 1>(params, bits, a, b, header_a, headers_b, terms, later, totals);
  }
}

template <class Config, int kColumn = 0, int kSize, class Totals>
__device__ __forceinline__ void promote_all(StepSums<Config, kSize>& sums,
                                            const int (&exponents)[Config::kOwn], Totals& totals) {
  if constexpr (kColumn < Config::kOwn) {
    constexpr int kFirst = kColumn * kThreadValues;
    promote<values_of<Config>(kColumn), kFirst, kFirst>(sums, exponents[kColumn], totals);
    promote_all<Config, kColumn + 1>(sums, exponents, totals);
  }
}

// A warpgroup's blocks of C.
template <class Config>
struct PromotedSums {
  static constexpr int kColumns = (Config::kOwn - 1) * kBlock + Config::kLastWidth;
  static constexpr int kSize = kColumns * kThreadValues / kBlock;
  Totals<kSize, Config::kKeepsRests> totals;
  typename Config::Later later;

  __device__ explicit PromotedSums(const typename Config::Later& later) : later(later) {}

  // totals += a block of A times the blocks of B whose bits are set; at least one bit is set.
  // `terms` are the largest terms of the blocks of C. Calls begun() once the products are issued,
  // and release() once the stage has been read, so that the products of the next stage can begin
  // before these sums are promoted.
  template <class Params, class Terms, class Begun, class Release>
  __device__ __forceinline__ void add(const Params& params, uint32_t bits, uint64_t a, uint64_t b,
                                      const SplitHeader& header_a, const SplitHeader* headers_b,
                                      const Terms& terms, const Begun& begun,
                                      const Release& release) {
    bool together = bits == (1u << Config::kOwn) - 1;
    int exponents[Config::kOwn];
#pragma unroll
    for (int i = 0; i < Config::kOwn; ++i) {
      const auto pair = whole_blocks(header_a, headers_b[i], i);
      together = together && !needs_exact<Config::kSplitParts>(pair, terms);
      exponents[i] = pair.exponent();
    }
    if (together) {
      StepSums<Config, kSize> sums;
      cute::warpgroup_arrive();
      multiply_split_parts<Config, 0, kColumns, 0, kBlock>(a, b, sums);
      cute::warpgroup_commit_batch();
      begun();
      cute::warpgroup_wait<0>();
      release();
      promote_all<Config>(sums, exponents, totals);
    } else {
      begun();
      add_single<Config>(params, bits, a, b, header_a, headers_b, terms, later, totals);
      release();
    }
  }

  // Adds what has been kept for later: all at the end of a tile, else only what needs its room.
  template <class Params>
  __device__ __forceinline__ void add_later(const Params& params, bool ends_tile) {
    later.multiply(operand_strides(params), ends_tile, totals);
  }

  __device__ __forceinline__ float total(int i) const { return totals.total(i); }

  __device__ __forceinline__ void reset() { totals = {}; }
};

}  // namespace spamm::kernels::multiply::sm90
