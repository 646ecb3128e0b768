// The sums of promoted_sums.cuh for blocks with edges of 32: a granule of 32 x 32 x 32 may be
// skipped beside valid ones. The granules of an operand block share its power of two.
//
// Each 32 of K have sums of their own, which are promoted on their own, so that no bit of a granule
// depends on the others. An instruction computes 64 rows; the sums of rows that are not valid are
// dropped instead of promoted. An infinity cannot reach them: such blocks are multiplied by FFMA,
// granule by granule.
#pragma once

#include "kernels/multiply/sm90/split/promoted_sums.cuh"

namespace spamm::kernels::multiply::sm90 {

// A warpgroup's blocks of C. Config as for PromotedSums, with kGranules == 2.
template <class Config>
class PromotedGranules {
  static constexpr int kSets = Config::kSets / 2;  // of each half of a step
  static constexpr int kSize = Config::kOwn * kThreadValues;
  static constexpr int kGranuleValues = kThreadValues / 2;
  static constexpr uint32_t kAllBits = (1u << Config::kOwn * Config::kBlockBits) - 1;
  template <int kValues>
  using HalfSums = float[kSets][kValues];

 public:
  // As PromotedSums::add(), with eight bits for each block.
  template <class Terms, class Begun, class Release>
  __device__ __forceinline__ void add(const SplitProduct& params, uint32_t bits, uint64_t a,
                                      uint64_t b, const SplitHeader& header_a,
                                      const SplitHeader* headers_b, const Terms& terms,
                                      const Begun& begun, const Release& release) {
    bool together = bits == kAllBits;
    int exponents[Config::kOwn];
#pragma unroll
    for (int i = 0; i < Config::kOwn; ++i) {
      together = together && !needs_exact<Config::kSplitParts>(header_a, headers_b[i], terms, i);
      exponents[i] = header_a.exponent + headers_b[i].exponent;
    }
    if (together) {
      HalfSums<kSize> sums[2];
      cute::warpgroup_arrive();
      multiply_half<0, 0, Config::kOwn * kBlock>(a, b, sums[0]);
      multiply_half<1, 0, Config::kOwn * kBlock>(a, b, sums[1]);
      cute::warpgroup_commit_batch();
      begun();
      cute::warpgroup_wait<0>();
      release();
      promote_blocks(sums, exponents);
    } else {
      begun();
      add_blocks(params, bits, a, b, header_a, headers_b, terms);
      release();
    }
  }

  __device__ __forceinline__ float total(int i) const { return totals_.total(i); }

  __device__ __forceinline__ void reset() { totals_ = {}; }

 private:
  // Issues the products of half kHalf of a step with kWidth columns of B, from kColumn on: the
  // small ones first. The caller commits and waits.
  template <int kHalf, int kColumn, int kWidth, int kValues>
  __device__ static __forceinline__ void multiply_half(uint64_t a, uint64_t b,
                                                       HalfSums<kValues>& sums) {
    constexpr int kDepth = kHalf * Config::kGranule;
    constexpr uint32_t kBlockStep = sizeof(OperandBlock) / kDescriptorUnit;
    constexpr uint32_t kOffset = column_offset<Config::kMajorB>(kColumn);
    const uint64_t a_low = advance(a, Config::kRows * kBlockStep), b_high = advance(b, kOffset);
    const uint64_t b_low = advance(b, kOffset + Config::kColumns * kBlockStep);
    const auto multiply = [&]<int kSet, int kParts>(uint64_t x, uint64_t y, ScaleOut start) {
      constexpr int kDepths = Config::kGranule / kParts;
      multiply_columns<__half, Config::kMajorA, Config::kMajorB, 0, kWidth, kDepth + kSet * kDepths,
                       kDepths>(x, y, sums[kSet], start);
    };
    multiply.template operator()<0, 1>(a, b_low, ScaleOut::Zero);
    multiply.template operator()<0, 1>(a_low, b_high, ScaleOut::One);
    multiply.template operator()<0, kSets>(a, b_high, ScaleOut::One);
    if constexpr (kSets == 2) multiply.template operator()<1, 2>(a, b_high, ScaleOut::Zero);
  }

  template <int kColumn = 0>
  __device__ __forceinline__ void promote_blocks(HalfSums<kSize> (&sums)[2],
                                                 const int (&exponents)[Config::kOwn]) {
    if constexpr (kColumn < Config::kOwn) {
      constexpr int kFirst = kColumn * kThreadValues;
      promote<kThreadValues, kFirst, kFirst>(sums[0], exponents[kColumn], totals_);
      promote<kThreadValues, kFirst, kFirst>(sums[1], exponents[kColumn], totals_);
      promote_blocks<kColumn + 1>(sums, exponents);
    }
  }

  // Multiplies block by block, and each half of a step by itself.
  template <int kColumn = 0, class Terms>
  __device__ __forceinline__ void add_blocks(const SplitProduct& params, uint32_t bits, uint64_t a,
                                             uint64_t b, const SplitHeader& header_a,
                                             const SplitHeader* headers_b, const Terms& terms) {
    if constexpr (kColumn < Config::kOwn) {
      const uint32_t of_block = bits >> kColumn * Config::kBlockBits & 0xff;
      if (of_block != 0) {
        const SplitHeader header_b = headers_b[kColumn];
        if (needs_exact<Config::kSplitParts>(header_a, header_b, terms, kColumn)) {
          add_exact_half<kColumn, 0>(params, of_block & 15, header_a, header_b);
          add_exact_half<kColumn, 1>(params, of_block >> 4, header_a, header_b);
        } else {
          const int exponent = header_a.exponent + header_b.exponent;
          add_half<kColumn, 0>(of_block & 15, a, b, exponent);
          add_half<kColumn, 1>(of_block >> 4, a, b, exponent);
        }
      }
      add_blocks<kColumn + 1>(params, bits, a, b, header_a, headers_b, terms);
    }
  }

  // The bits of a half are those of its granules: the two rows of the first column, then the
  // second.
  __device__ static bool is_own_row_valid(uint32_t bits, int column) {
    return bits >> (column * 2 + threadIdx.x % 128 / 64) & 1;
  }

  template <int kColumn, int kHalf>
  __device__ __forceinline__ void add_half(uint32_t bits, uint64_t a, uint64_t b, int exponent) {
    constexpr int kFirst = kColumn * kThreadValues, kSecond = kFirst + kGranuleValues;
    const bool first = (bits & 3) != 0, second = (bits >> 2) != 0;
    if (first && second) {
      HalfSums<kThreadValues> sums;
      wait_for<kHalf, kColumn * kBlock, kBlock>(a, b, sums);
      if (is_own_row_valid(bits, 0)) promote<kGranuleValues, kFirst, 0>(sums, exponent, totals_);
      if (is_own_row_valid(bits, 1)) {
        promote<kGranuleValues, kSecond, kGranuleValues>(sums, exponent, totals_);
      }
    } else if (first) {
      HalfSums<kGranuleValues> sums;
      wait_for<kHalf, kColumn * kBlock, Config::kGranule>(a, b, sums);
      if (is_own_row_valid(bits, 0)) promote<kGranuleValues, kFirst, 0>(sums, exponent, totals_);
    } else if (second) {
      HalfSums<kGranuleValues> sums;
      wait_for<kHalf, kColumn * kBlock + Config::kGranule, Config::kGranule>(a, b, sums);
      if (is_own_row_valid(bits, 1)) promote<kGranuleValues, kSecond, 0>(sums, exponent, totals_);
    }
  }

  template <int kHalf, int kColumn, int kWidth, int kValues>
  __device__ static __forceinline__ void wait_for(uint64_t a, uint64_t b, HalfSums<kValues>& sums) {
    cute::warpgroup_arrive();
    multiply_half<kHalf, kColumn, kWidth>(a, b, sums);
    cute::warpgroup_commit_batch();
    cute::warpgroup_wait<0>();
  }

  template <int kColumn, int kHalf>
  __device__ __forceinline__ void add_exact_half(const SplitProduct& params, uint32_t bits,
                                                 const SplitHeader& header_a,
                                                 const SplitHeader& header_b) {
    if (is_own_row_valid(bits, 0)) add_exact_granule<kColumn, kHalf, 0>(params, header_a, header_b);
    if (is_own_row_valid(bits, 1)) add_exact_granule<kColumn, kHalf, 1>(params, header_a, header_b);
  }

  template <int kColumn, int kHalf, int kGranuleColumn>
  __device__ __forceinline__ void add_exact_granule(const SplitProduct& params,
                                                    const SplitHeader& header_a,
                                                    const SplitHeader& header_b) {
    constexpr int kFirst = kGranuleColumn * kGranuleValues;
    float sum[1][kThreadValues] = {};
    add_exact<Config, kFirst, kGranuleValues, kFirst, kHalf * Config::kGranule, Config::kGranule>(
        params, header_a, header_b, sum[0]);
    promote<kGranuleValues, kColumn * kThreadValues + kFirst, kFirst>(sum, 0, totals_);
  }

  Totals<kSize, Config::kKeepsRests> totals_;
};

}  // namespace spamm::kernels::multiply::sm90
