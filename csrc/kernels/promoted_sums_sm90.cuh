// Sums of float32's accuracy from operands in two halves each.
//
// With A = 2^i (a + a') and B = 2^j (b + b'), A B is 2^(i+j) (a b' + a' b + a b); a' b' is below
// float32's own rounding. Tensor cores truncate when they add, so the small products come first,
// and after each step of K, 64 deep, the sum goes with its power of two into float32 registers that
// round. The order of all sums is that of K, at fixed places: what other blocks hold, or whether
// they are skipped, does not change a block's share.
//
// These serve every Config that has kMajorA and kMajorB, kRows, kColumns, kOwn and
// kLastWidth: columns of the last of a warpgroup's own blocks, a multiple of 8. A stage has all
// blocks of A, high ones first, and then those of B.
#pragma once

#include "numeric.cuh"
#include "split_stage_sm90.cuh"

namespace spamm::kernels::sm90 {

// Sums of one of a warpgroup's own blocks that a thread holds.
template <class Config>
constexpr int values_of(int column) {
  return column == Config::kOwn - 1 ? Config::kLastWidth * kThreadValues / kBlock : kThreadValues;
}

// total += 2^exponent * sum, for a block of C: kCount values, from kTo and kFrom on.
template <int kCount, int kTo, int kFrom, int kSums, int kTotals>
__device__ __forceinline__ void promote(float (&sum)[kSums], int exponent,
                                        float (&total)[kTotals]) {
  const int first = normal_exponent(exponent);
  if (first != exponent) {
    const float rest = power_of_two(normal_exponent(exponent - first));
#pragma unroll
    for (int i = 0; i < kCount; ++i) sum[kFrom + i] *= rest;
  }
  const float scale = power_of_two(first);
#pragma unroll
  for (int i = 0; i < kCount; ++i) total[kTo + i] = fmaf(sum[kFrom + i], scale, total[kTo + i]);
}

// sum = the products of the halves of a block of A and kWidth columns, from kColumn on, of blocks
// of B, at these addresses in a stage.
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

// Block by block: those that are not multiplied together.
template <class Config, int kColumn = 0, class Params, int kTotals>
__device__ __forceinline__ void add_single(const Params& params, uint32_t bits, uint64_t a,
                                           uint64_t b, const SplitHeader& header_a,
                                           const SplitHeader* headers_b, float (&total)[kTotals]) {
  if constexpr (kColumn < Config::kOwn) {
    constexpr int kValues = values_of<Config>(kColumn);
    if (bits >> kColumn & 1) {
      const SplitHeader header_b = headers_b[kColumn];
      if (needs_exact(header_a, header_b)) {
        float sum[kValues] = {};
        add_exact<Config, 0, kValues>(params, header_a, header_b, sum);
#pragma unroll
        for (int i = 0; i < kValues; ++i) total[kColumn * kThreadValues + i] += sum[i];
      } else {
        float sum[kThreadValues];
        multiply_halves<Config, kColumn * kBlock, kBlock>(a, b, sum);
        promote<kValues, kColumn * kThreadValues, 0>(sum, header_a.exponent + header_b.exponent,
                                                     total);
      }
    }
    add_single<Config, kColumn + 1>(params, bits, a, b, header_a, headers_b, total);
  }
}

template <class Config, int kColumn = 0, int kSize>
__device__ __forceinline__ void promote_all(float (&sum)[kSize],
                                            const int (&exponents)[Config::kOwn],
                                            float (&total)[kSize]) {
  if constexpr (kColumn < Config::kOwn) {
    constexpr int kFirst = kColumn * kThreadValues;
    promote<values_of<Config>(kColumn), kFirst, kFirst>(sum, exponents[kColumn], total);
    promote_all<Config, kColumn + 1>(sum, exponents, total);
  }
}

// A warpgroup's blocks of C.
template <class Config>
struct PromotedSums {
  static constexpr int kColumns = (Config::kOwn - 1) * kBlock + Config::kLastWidth;
  float values[kColumns * kThreadValues / kBlock] = {};

  // values += a block of A times those of the kOwn blocks of B whose bits are set, one at least.
  // Calls release() when the stage is done with: then the next one's products can begin before this
  // one's are promoted.
  template <class Params, class Release>
  __device__ __forceinline__ void add(const Params& params, uint32_t bits, uint64_t a, uint64_t b,
                                      const SplitHeader& header_a, const SplitHeader* headers_b,
                                      const Release& release) {
    bool together = bits == (1u << Config::kOwn) - 1;
    int exponents[Config::kOwn];
#pragma unroll
    for (int i = 0; i < Config::kOwn; ++i) {
      together &= !needs_exact(header_a, headers_b[i]);
      exponents[i] = header_a.exponent + headers_b[i].exponent;
    }
    if (together) {
      float sum[kColumns * kThreadValues / kBlock];
      multiply_halves<Config, 0, kColumns>(a, b, sum);
      release();
      promote_all<Config>(sum, exponents, values);
    } else {
      add_single<Config>(params, bits, a, b, header_a, headers_b, values);
      release();
    }
  }

  __device__ __forceinline__ float total(int i) const { return values[i]; }

  __device__ __forceinline__ void reset() {
#pragma unroll
    for (float& value : values) value = 0;
  }
};

}  // namespace spamm::kernels::sm90
