// Sums of TF32's accuracy from operands in one split part each. They stay in the accumulators of
// the tensor cores; each block of C has a power of two for its sums.
//
// If a block product has another power of two than the sums, the sums are first multiplied by the
// quotient, which is exact. norm_map/split.cuh uses coarse steps of 2^4, so this is rare.
// Range: a scaled block product is below 2^36, and a sum of 2^25 of them below 2^61. So the sums
// may be scaled to 60 powers below the largest product without overflow. A product beyond that, or
// one that split parts cannot represent, is added by FFMA, with the sums at 2^0.
#pragma once

#include "kernels/common/numeric.cuh"
#include "kernels/multiply/sm90/multiply.cuh"
#include "kernels/multiply/sm90/split/stage.cuh"

namespace spamm::kernels::multiply::sm90 {

// The exponent of a block's sums, and the largest exponent of its products so far. Packed into one
// register, because registers are scarce here.
class SumScale {
  static constexpr int kNone = -10000;  // there is no sum yet
  static constexpr int kRange = 60;     // how far the sums may be below the largest product

 public:
  static constexpr int kAnything = 66;  // for a product of unknown magnitude, up to 2^128

  __device__ bool has_sums() const { return exponent() != kNone; }
  __device__ int exponent() const { return static_cast<int16_t>(both_); }
  __device__ bool reaches(int product) const { return product >= most() - kRange; }

  __device__ void move(int exponent) { set(exponent, most()); }
  __device__ void add(int product) { set(exponent(), max(most(), product)); }

 private:
  __device__ int most() const { return both_ >> 16; }
  __device__ void set(int exponent, int most) { both_ = most << 16 | (exponent & 0xffff); }

  int both_ = kNone * 0x10000 | (kNone & 0xffff);
};

// values[kFirst...] *= 2^exponent. Exact, except for results below float32's normal numbers.
template <int kFirst, int kSize>
__device__ __forceinline__ void scale_by(int exponent, float (&values)[kSize]) {
#pragma unroll 1
  while (exponent != 0) {
    const int step = normal_exponent(exponent);
    const float factor = power_of_two(step);
#pragma unroll
    for (int i = 0; i < kThreadValues; ++i) values[kFirst + i] *= factor;
    exponent -= step;
  }
}

// A warpgroup's blocks of C.
template <class Config>
struct ScaledSums {
  float values[Config::kOwn * kThreadValues] = {};
  SumScale scales[Config::kOwn];

  // values += a block of A times the blocks of B whose bits are set; at least one bit is set.
  // `terms` are the largest terms of the blocks of C. Calls begun() and release() once the stage
  // has been read.
  template <class Begun, class Release>
  __device__ __forceinline__ void add(const SplitProduct& params, uint32_t bits, uint64_t a,
                                      uint64_t b, const SplitHeader& header_a,
                                      const SplitHeader* headers_b, const LargestTerms& terms,
                                      const Begun& begun, const Release& release) {
    bool together = bits == (1u << Config::kOwn * Config::kBlockBits) - 1;
    bool as_they_are = together;
#pragma unroll
    for (int i = 0; i < Config::kOwn; ++i) {
      const int exponent = header_a.exponent + headers_b[i].exponent;
      together = together && by_split_parts(i, header_a, headers_b[i], terms);
      as_they_are &= exponent == scales[i].exponent();
    }
    if (together) {
      if (!as_they_are) scale_for_all(header_a, headers_b);
      float wide[Config::kOwn * kThreadValues];  // for ptxas, see hand_over()
      hand_over<Config::kOwn * kThreadValues>(values, wide);
      multiply_part<Config, 0, Config::kOwn * kBlock, 0, kBlock>(a, b, wide);
      hand_over<Config::kOwn * kThreadValues>(wide, values);
    } else {
      add_single(params, bits, a, b, header_a, headers_b, terms);
    }
    begun();
    release();
  }

  // Sum i without its scale. Two factors, because one reaches only 2^127.
  __device__ __forceinline__ float total(int i) const {
    const int exponent = scales[i / kThreadValues].exponent();
    const int first = normal_exponent(exponent);
    return values[i] * power_of_two(first) * power_of_two(normal_exponent(exponent - first));
  }

  __device__ __forceinline__ void reset() {
#pragma unroll
    for (float& value : values) value = 0;
#pragma unroll
    for (SumScale& scale : scales) scale = {};
  }

 private:
  static constexpr uint32_t kBlockMask = (1u << Config::kBlockBits) - 1;

  __device__ bool by_split_parts(int column, const SplitHeader& a, const SplitHeader& b,
                                 const LargestTerms& terms) const {
    return ((a.kinds | b.kinds) & kSplitZero) == 0 &&
           scales[column].reaches(a.exponent + b.exponent) && !needs_exact<1>(a, b, terms, column);
  }

  // Scales a block's sums to 2^exponent.
  template <int kColumn>
  __device__ __forceinline__ void move(int exponent) {
    SumScale& scale = scales[kColumn];
    if (scale.has_sums()) {
      scale_by<kColumn * kThreadValues>(scale.exponent() - exponent, values);
    }
    scale.move(exponent);
  }

  // The same, and records that a product with this exponent follows.
  template <int kColumn>
  __device__ __forceinline__ void scale_for(int exponent) {
    move<kColumn>(exponent);
    scales[kColumn].add(exponent);
  }

  template <int kColumn = 0>
  __device__ __forceinline__ void scale_for_all(const SplitHeader& a, const SplitHeader* b) {
    if constexpr (kColumn < Config::kOwn) {
      scale_for<kColumn>(a.exponent + b[kColumn].exponent);
      scale_for_all<kColumn + 1>(a, b);
    }
  }

  // Multiplies block by block, as in PromotedSums.
  template <int kColumn = 0>
  __device__ __forceinline__ void add_single(const SplitProduct& params, uint32_t bits, uint64_t a,
                                             uint64_t b, const SplitHeader& header_a,
                                             const SplitHeader* headers_b,
                                             const LargestTerms& terms) {
    if constexpr (kColumn < Config::kOwn) {
      if ((bits >> kColumn * Config::kBlockBits & kBlockMask) != 0) {
        add_block<kColumn>(params, bits, a, b, header_a, headers_b[kColumn], terms);
      }
      add_single<kColumn + 1>(params, bits, a, b, header_a, headers_b, terms);
    }
  }

  template <int kColumn>
  __device__ __forceinline__ void add_block(const SplitProduct& params, uint32_t bits, uint64_t a,
                                            uint64_t b, const SplitHeader& header_a,
                                            const SplitHeader& header_b,
                                            const LargestTerms& terms) {
    const int exponent = header_a.exponent + header_b.exponent;
    const int kinds = header_a.kinds | header_b.kinds;
    if (by_split_parts(kColumn, header_a, header_b, terms)) {
      scale_for<kColumn>(exponent);
      multiply_valid<kColumn>(bits, a, b);
    } else if ((kinds & kSplitSpecial) != 0 || (kinds & kSplitZero) == 0) {
      move<kColumn>(0);
      scales[kColumn].add((kinds & kSplitSpecial) != 0 ? SumScale::kAnything : exponent);
      add_exact_valid<kColumn>(params, bits, header_a, header_b);
    }
  }

  template <int kColumn>
  __device__ __forceinline__ void multiply_valid(uint32_t bits, uint64_t a, uint64_t b) {
    if constexpr (Config::kGranules == 1) {
      multiply_part<Config, kColumn * kBlock, kBlock, 0, kBlock>(a, b, values);
    } else {
      multiply_column<Config, 2 * kColumn>(bits, a, b, values);
      multiply_column<Config, 2 * kColumn + 1>(bits, a, b, values);
    }
  }

  template <int kColumn>
  __device__ __forceinline__ void add_exact_valid(const SplitProduct& params, uint32_t bits,
                                                  const SplitHeader& header_a,
                                                  const SplitHeader& header_b) {
    if constexpr (Config::kGranules == 1) {
      add_exact<Config, kColumn * kThreadValues, kThreadValues>(params, header_a, header_b, values);
    } else {
      const uint32_t own_row = bits >> (kColumn * Config::kBlockBits + threadIdx.x % 128 / 64);
      add_exact_granule<kColumn, 0, 0>(params, own_row, header_a, header_b);
      add_exact_granule<kColumn, 1, 0>(params, own_row, header_a, header_b);
      add_exact_granule<kColumn, 0, 1>(params, own_row, header_a, header_b);
      add_exact_granule<kColumn, 1, 1>(params, own_row, header_a, header_b);
    }
  }

  // `own_row` has the bits of the granules of this thread's row at multiples of 2.
  template <int kColumn, int kGranuleColumn, int kGranuleDepth>
  __device__ __forceinline__ void add_exact_granule(const SplitProduct& params, uint32_t own_row,
                                                    const SplitHeader& header_a,
                                                    const SplitHeader& header_b) {
    constexpr int kCount = kThreadValues / 2, kValue = kGranuleColumn * kCount;
    if ((own_row >> (kGranuleDepth * 4 + kGranuleColumn * 2) & 1) == 0) return;
    add_exact<Config, kColumn * kThreadValues + kValue, kCount, kValue,
              kGranuleDepth * Config::kGranule, Config::kGranule>(params, header_a, header_b,
                                                                  values);
  }
};

}  // namespace spamm::kernels::multiply::sm90
