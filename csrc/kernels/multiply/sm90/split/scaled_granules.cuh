// The sums of scaled_sums.cuh for blocks with edges of 32: a granule of 32 x 32 x 32 may be skipped
// beside valid ones, and the sums of each granule of C have a power of two of their own.
//
// An instruction computes 64 rows, that is two granules, each in its own warps: their sums may have
// different scales. All threads know the scales of all granules, so that they agree on which
// products to issue.
#pragma once

#include "kernels/multiply/sm90/multiply.cuh"
#include "kernels/multiply/sm90/split/granules.cuh"
#include "kernels/multiply/sm90/split/scaled_sums.cuh"

namespace spamm::kernels::multiply::sm90 {

// A warpgroup's block of C. Config as for ScaledSums, with kGranules == 2 and kOwn == 1.
template <class Config>
class ScaledGranules {
  static_assert(Config::kOwn == 1);
  using Header = typename Config::Header;
  using Terms = LargestTerms<Config>;

 public:
  // As ScaledSums::add(), with eight bits.
  template <class Begun, class Release>
  __device__ __forceinline__ void add(const SplitProduct& params, uint32_t bits, uint64_t a,
                                      uint64_t b, const Header& header_a, const Header* headers_b,
                                      const Terms& terms, const Begun& begun,
                                      const Release& release) {
    add_half<0>(params, bits & 15, a, b, header_a, headers_b[0], terms);
    add_half<1>(params, bits >> 4, a, b, header_a, headers_b[0], terms);
    begun();
    release();
  }

  // Sum i without its scale.
  __device__ __forceinline__ float total(int i) const {
    const SumScale(&scales)[2] = scales_[i / kGranuleValues];
    return scaled(values_[i], own_row() == 0 ? scales[0].exponent() : scales[1].exponent());
  }

  __device__ __forceinline__ void reset() {
#pragma unroll
    for (float& value : values_) value = 0;
#pragma unroll
    for (auto& column : scales_) column[0] = column[1] = {};
  }

 private:
  // Adds the granules of half kHalf of a step whose bits are set.
  template <int kHalf>
  __device__ __forceinline__ void add_half(const SplitProduct& params, uint32_t valid, uint64_t a,
                                           uint64_t b, const Header& header_a,
                                           const Header& header_b, const Terms& terms) {
    if (valid == 0) return;
    constexpr int kDepth = kHalf * Config::kGranule;
    uint32_t split = 0, exact = 0;
    prepare<kHalf>(valid, header_a, header_b, terms, split, exact);
    if (split == 15) {
      float wide[kThreadValues];  // for ptxas, see hand_over()
      hand_over<kThreadValues>(values_, wide);
      multiply_part<Config, 0, kBlock, kDepth, Config::kGranule>(a, b, wide);
      hand_over<kThreadValues>(wide, values_);
    } else {
      multiply_rows<Config, 0, kDepth, Config::kGranule>(split & 3, a, b, values_);
      multiply_rows<Config, 1, kDepth, Config::kGranule>(split >> 2, a, b, values_);
    }
    if (has_own_row(exact, 0)) add_exact_granule<kHalf, 0>(params, header_a, header_b);
    if (has_own_row(exact, 1)) add_exact_granule<kHalf, 1>(params, header_a, header_b);
  }

  // Decides which granules are multiplied in split parts and which exactly, and scales their sums
  // to the products that follow. Products with zeros are neither.
  template <int kHalf, int kBit = 0>
  __device__ __forceinline__ void prepare(uint32_t valid, const Header& header_a,
                                          const Header& header_b, const Terms& terms,
                                          uint32_t& split, uint32_t& exact) {
    if constexpr (kBit < 4) {
      constexpr int kRow = kBit % 2, kColumn = kBit / 2;
      constexpr uint32_t kMask = 1u << kBit;
      if ((valid & kMask) != 0) {
        const GranulePair<Header> pair{header_a, header_b, kRow, kColumn, kHalf};
        const int kinds = pair.kinds_a() | pair.kinds_b(), exponent = pair.exponent();
        SumScale& scale = scales_[kColumn][kRow];
        if ((kinds & kSplitZero) == 0 && scale.reaches(exponent) && !needs_exact<1>(pair, terms)) {
          move<kRow, kColumn>(exponent);
          scale.add(exponent);
          split |= kMask;
        } else if ((kinds & kSplitSpecial) != 0 || (kinds & kSplitZero) == 0) {
          move<kRow, kColumn>(0);
          scale.add((kinds & kSplitSpecial) != 0 ? SumScale::kAnything : exponent);
          exact |= kMask;
        }
      }
      prepare<kHalf, kBit + 1>(valid, header_a, header_b, terms, split, exact);
    }
  }

  // Scales a granule's sums to 2^exponent.
  template <int kRow, int kColumn>
  __device__ __forceinline__ void move(int exponent) {
    SumScale& scale = scales_[kColumn][kRow];
    if (scale.has_sums() && own_row() == kRow) {
      scale_by<kColumn * kGranuleValues, kGranuleValues>(scale.exponent() - exponent, values_);
    }
    scale.move(exponent);
  }

  template <int kHalf, int kColumn>
  __device__ __forceinline__ void add_exact_granule(const SplitProduct& params,
                                                    const Header& header_a,
                                                    const Header& header_b) {
    constexpr int kFirst = kColumn * kGranuleValues;
    add_exact<Config, kFirst, kGranuleValues, kFirst, kHalf * Config::kGranule, Config::kGranule>(
        params, header_a, header_b, values_);
  }

  float values_[kThreadValues] = {};
  SumScale scales_[2][2];  // columns, rows
};

}  // namespace spamm::kernels::multiply::sm90
