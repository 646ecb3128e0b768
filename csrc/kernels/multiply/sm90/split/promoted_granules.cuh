// The sums of promoted_sums.cuh for blocks with edges of 32: a granule of 32 x 32 x 32 may be
// skipped beside valid ones, and has a power of two of its own.
//
// Each 32 of K have sums of their own, which are promoted on their own, so that no bit of a granule
// depends on the others. An instruction computes 64 rows; the sums of rows that are not valid are
// dropped instead of promoted. So are those of granules that need an exact product.
#pragma once

#include "kernels/multiply/sm90/split/promoted_sums.cuh"
#include "kernels/multiply/sm90/split/stage.cuh"

namespace spamm::kernels::multiply::sm90 {

// A block of C has eight bits for
// a step: the four granules of its first half of K, then the second; in each half the two rows of
// the first column, then the second (pipeline.cuh).
constexpr int kGranuleValues = kThreadValues / 2;  // sums of a granule in each of its threads

// The row of granules that this thread's sums belong to.
__device__ __forceinline__ int own_row() { return threadIdx.x % 128 / 64; }

// Tells whether the bits of a half contain the granule of this thread's row in `column`.
__device__ __forceinline__ bool has_own_row(uint32_t bits, int column) {
  return bits >> (column * 2 + own_row()) & 1;
}

// The bits of the granules of block `column` of the warpgroup that need exact products.
template <class Header, class Terms>
__device__ __forceinline__ uint32_t exact_granules(const Header& a, const Header& b,
                                                   const Terms& terms, int column) {
  // Quickly, whether any may: the flags of all granules are one word.
  const auto flags_a = reinterpret_cast<const uint32_t&>(a.flags);
  const auto flags_b = reinterpret_cast<const uint32_t&>(b.flags);
  constexpr uint32_t kEach = 0x01010101, kWide = kSplitWide * kEach, kFaint = kSplitFaint * kEach;
  const bool any_special = ((flags_a | flags_b) & kSplitSpecial * kEach) != 0;
  const bool any_faint = ((flags_a | flags_b) & kFaint) != 0;
  const bool may = any_faint && (flags_a & kWide) != 0 && (flags_b & kWide) != 0;
  if (!any_special && !may) return 0;
  uint32_t exact = 0;
#pragma unroll 1
  for (int i = 0; i < 8; ++i) {
    const GranulePair<Header> pair{a, b, i % 2, column * 2 + i / 2 % 2, i / 4};
    exact |= static_cast<uint32_t>(needs_exact<2>(pair, terms)) << i;
  }
  return exact;
}

// The exponents of the products in this thread's row of granules. Two of them share a register,
// because registers are scarce.
template <int kOwn>
class OwnExponents {
 public:
  template <class Header>
  __device__ __forceinline__ OwnExponents(const Header& a, const Header* b) {
    const int row = own_row();
#pragma unroll
    for (int column = 0; column < 2 * kOwn; ++column) {
      const auto sum = [&](int k) {
        return a.exponent(row, k) + b[column / 2].exponent(column % 2, k);
      };
      halves_[column] = sum(1) << 16 | (sum(0) & 0xffff);
    }
  }

  // `column` counts columns of granules, `k` the halves of a step.
  __device__ __forceinline__ int at(int column, int k) const {
    return k == 0 ? static_cast<int16_t>(halves_[column]) : halves_[column] >> 16;
  }

 private:
  int halves_[2 * kOwn];
};

// A warpgroup's blocks of C. Config as for PromotedSums, with kGranules == 2.
template <class Config>
class PromotedGranules {
  using Header = typename Config::Header;
  using Terms = LargestTerms<Config>;
  static constexpr int kSets = Config::kSets / 2;  // of each half of a step
  static constexpr int kSize = Config::kOwn * kThreadValues;
  static constexpr uint32_t kAllBits = (1u << Config::kOwn * Config::kBlockBits) - 1;
  template <int kValues>
  using HalfSums = float[kSets][kValues];

 public:
  __device__ explicit PromotedGranules(const NothingLater&) {}

  // As PromotedSums::add(), with eight bits for each block.
  template <class Begun, class Release>
  __device__ __forceinline__ void add(const SplitProduct& params, uint32_t bits, uint64_t a,
                                      uint64_t b, const Header& header_a, const Header* headers_b,
                                      const Terms& terms, const Begun& begun,
                                      const Release& release) {
    bool together = bits == kAllBits;
#pragma unroll
    for (int i = 0; i < Config::kOwn; ++i) {
      together = together && exact_granules(header_a, headers_b[i], terms, i) == 0;
    }
    if (together) {
      HalfSums<kSize> sums[2];
      cute::warpgroup_arrive();
      multiply_half<0, 0, Config::kOwn * kBlock>(a, b, sums[0]);
      multiply_half<1, 0, Config::kOwn * kBlock>(a, b, sums[1]);
      cute::warpgroup_commit_batch();
      begun();
      const OwnExponents<Config::kOwn> exponents(header_a, headers_b);
      cute::warpgroup_wait<0>();
      release();
      promote_half<0>(sums[0], exponents);
      promote_half<1>(sums[1], exponents);
    } else {
      begun();
      add_blocks(params, bits, a, b, header_a, headers_b, terms);
      release();
    }
  }

  __device__ __forceinline__ void add_later(const SplitProduct&, bool) {}

  __device__ __forceinline__ float total(int i) const { return totals_.total(i); }

  __device__ __forceinline__ void reset() { totals_ = {}; }

 private:
  // multiply_split_parts() of half kHalf of a step.
  template <int kHalf, int kColumn, int kWidth, int kValues>
  __device__ static __forceinline__ void multiply_half(uint64_t a, uint64_t b,
                                                       HalfSums<kValues>& sums) {
    multiply_split_parts<Config, kColumn, kWidth, kHalf * Config::kGranule, Config::kGranule>(a, b,
                                                                                              sums);
  }

  // `kColumn` counts columns of granules.
  template <int kHalf, int kColumn = 0>
  __device__ __forceinline__ void promote_half(HalfSums<kSize>& sums,
                                               const OwnExponents<Config::kOwn>& exponents) {
    if constexpr (kColumn < 2 * Config::kOwn) {
      constexpr int kFirst = kColumn * kGranuleValues;
      promote<kGranuleValues, kFirst, kFirst>(sums, exponents.at(kColumn, kHalf), totals_);
      promote_half<kHalf, kColumn + 1>(sums, exponents);
    }
  }

  // Multiplies block by block, and each half of a step by itself.
  template <int kColumn = 0>
  __device__ __forceinline__ void add_blocks(const SplitProduct& params, uint32_t bits, uint64_t a,
                                             uint64_t b, const Header& header_a,
                                             const Header* headers_b, const Terms& terms) {
    if constexpr (kColumn < Config::kOwn) {
      const uint32_t valid = bits >> kColumn * Config::kBlockBits & 0xff;
      if (valid != 0) {
        const Header& header_b = headers_b[kColumn];
        const uint32_t exact = valid & exact_granules(header_a, header_b, terms, kColumn);
        add_half<kColumn, 0>(params, valid & 15, exact & 15, a, b, header_a, header_b);
        add_half<kColumn, 1>(params, valid >> 4, exact >> 4, a, b, header_a, header_b);
      }
      add_blocks<kColumn + 1>(params, bits, a, b, header_a, headers_b, terms);
    }
  }

  // The bits of a half are those of its granules: the two rows of the first column, then the
  // second.
  template <int kColumn, int kHalf>
  __device__ __forceinline__ void add_half(const SplitProduct& params, uint32_t valid,
                                           uint32_t exact, uint64_t a, uint64_t b,
                                           const Header& header_a, const Header& header_b) {
    const uint32_t split = valid & ~exact;
    const auto exponent = [&](int column) {
      return header_a.exponent(own_row(), kHalf) + header_b.exponent(column, kHalf);
    };
    constexpr int kFirst = kColumn * kThreadValues, kSecond = kFirst + kGranuleValues;
    const bool first = (split & 3) != 0, second = (split >> 2) != 0;
    if (first && second) {
      HalfSums<kThreadValues> sums;
      wait_for<kHalf, kColumn * kBlock, kBlock>(a, b, sums);
      if (has_own_row(split, 0)) promote<kGranuleValues, kFirst, 0>(sums, exponent(0), totals_);
      if (has_own_row(split, 1)) {
        promote<kGranuleValues, kSecond, kGranuleValues>(sums, exponent(1), totals_);
      }
    } else if (first) {
      HalfSums<kGranuleValues> sums;
      wait_for<kHalf, kColumn * kBlock, Config::kGranule>(a, b, sums);
      if (has_own_row(split, 0)) promote<kGranuleValues, kFirst, 0>(sums, exponent(0), totals_);
    } else if (second) {
      HalfSums<kGranuleValues> sums;
      wait_for<kHalf, kColumn * kBlock + Config::kGranule, Config::kGranule>(a, b, sums);
      if (has_own_row(split, 1)) promote<kGranuleValues, kSecond, 0>(sums, exponent(1), totals_);
    }
    if (has_own_row(exact, 0)) add_exact_granule<kColumn, kHalf, 0>(params, header_a, header_b);
    if (has_own_row(exact, 1)) add_exact_granule<kColumn, kHalf, 1>(params, header_a, header_b);
  }

  template <int kHalf, int kColumn, int kWidth, int kValues>
  __device__ static __forceinline__ void wait_for(uint64_t a, uint64_t b, HalfSums<kValues>& sums) {
    cute::warpgroup_arrive();
    multiply_half<kHalf, kColumn, kWidth>(a, b, sums);
    cute::warpgroup_commit_batch();
    cute::warpgroup_wait<0>();
  }

  template <int kColumn, int kHalf, int kGranuleColumn>
  __device__ __forceinline__ void add_exact_granule(const SplitProduct& params,
                                                    const Header& header_a,
                                                    const Header& header_b) {
    constexpr int kFirst = kGranuleColumn * kGranuleValues;
    float sum[1][kGranuleValues] = {};
    add_exact<Config, 0, kGranuleValues, kFirst, kHalf * Config::kGranule, Config::kGranule>(
        params, header_a, header_b, sum[0]);
    promote<kGranuleValues, kColumn * kThreadValues + kFirst, 0>(sum, 0, totals_);
  }

  Totals<kSize, Config::kKeepsRests> totals_;
};

}  // namespace spamm::kernels::multiply::sm90
