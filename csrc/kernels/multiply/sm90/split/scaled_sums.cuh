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

// value * 2^exponent. Two factors, because one reaches only 2^127.
__device__ __forceinline__ float scaled(float value, int exponent) {
  const int first = normal_exponent(exponent);
  return value * power_of_two(first) * power_of_two(normal_exponent(exponent - first));
}

// A warpgroup's blocks of C.
template <class Config>
struct ScaledSums {
  float values[Config::kOwn * kThreadValues] = {};
  SumScale scales[Config::kOwn];

  __device__ explicit ScaledSums(const NothingLater&) {}

  // values += a block of A times the blocks of B whose bits are set; at least one bit is set.
  // `terms` are the largest terms of the blocks of C. Calls begun() and release() once the stage
  // has been read.
  template <class Terms, class Begun, class Release>
  __device__ __forceinline__ void add(const SplitProduct& params, uint32_t bits, uint64_t a,
                                      uint64_t b, const SplitHeader& header_a,
                                      const SplitHeader* headers_b, const Terms& terms,
                                      const Begun& begun, const Release& release) {
    bool together = bits == (1u << Config::kOwn) - 1;
    bool as_they_are = together;
#pragma unroll
    for (int i = 0; i < Config::kOwn; ++i) {
      const auto pair = whole_blocks(header_a, headers_b[i], i);
      together = together && by_split_parts(pair, terms);
      as_they_are &= pair.exponent() == scales[i].exponent();
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

  __device__ __forceinline__ void add_later(const SplitProduct&, bool) {}

  // Sum i without its scale.
  __device__ __forceinline__ float total(int i) const {
    return scaled(values[i], scales[i / kThreadValues].exponent());
  }

  // By moves that ptxas cannot see through: zeros that it knows, it keeps in memory for later.
  __device__ __forceinline__ void reset() {
#pragma unroll
    for (float& value : values) asm volatile("mov.b32 %0, 0;" : "=f"(value));
#pragma unroll
    for (SumScale& scale : scales) scale = {};
  }

 private:
  template <class Terms>
  __device__ bool by_split_parts(const GranulePair<SplitHeader>& pair, const Terms& terms) const {
    return ((pair.kinds_a() | pair.kinds_b()) & kSplitZero) == 0 &&
           scales[pair.column].reaches(pair.exponent()) && !needs_exact<1>(pair, terms);
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
      scale_for<kColumn>(a.exponent() + b[kColumn].exponent());
      scale_for_all<kColumn + 1>(a, b);
    }
  }

  // Multiplies block by block, as in PromotedSums.
  template <int kColumn = 0, class Terms>
  __device__ __forceinline__ void add_single(const SplitProduct& params, uint32_t bits, uint64_t a,
                                             uint64_t b, const SplitHeader& header_a,
                                             const SplitHeader* headers_b, const Terms& terms) {
    if constexpr (kColumn < Config::kOwn) {
      if (bits >> kColumn & 1) {
        add_block<kColumn>(params, a, b, whole_blocks(header_a, headers_b[kColumn], kColumn),
                           terms);
      }
      add_single<kColumn + 1>(params, bits, a, b, header_a, headers_b, terms);
    }
  }

  template <int kColumn, class Terms>
  __device__ __forceinline__ void add_block(const SplitProduct& params, uint64_t a, uint64_t b,
                                            const GranulePair<SplitHeader>& pair,
                                            const Terms& terms) {
    const int exponent = pair.exponent();
    const int kinds = pair.kinds_a() | pair.kinds_b();
    if (by_split_parts(pair, terms)) {
      scale_for<kColumn>(exponent);
      multiply_part<Config, kColumn * kBlock, kBlock, 0, kBlock>(a, b, values);
    } else if ((kinds & kSplitSpecial) != 0 || (kinds & kSplitZero) == 0) {
      move<kColumn>(0);
      scales[kColumn].add((kinds & kSplitSpecial) != 0 ? SumScale::kAnything : exponent);
      add_exact_products<kColumn>(params, pair);
    }
  }

  // Four sums at a time, because registers are scarce.
  template <int kColumn, int kValue = 0>
  __device__ __forceinline__ void add_exact_products(const SplitProduct& params,
                                                     const GranulePair<SplitHeader>& pair) {
    if constexpr (kValue < kThreadValues) {
      add_exact<Config, kColumn * kThreadValues + kValue, 4, kValue>(params, pair.a, pair.b,
                                                                     values);
      add_exact_products<kColumn, kValue + 4>(params, pair);
    }
  }
};

}  // namespace spamm::kernels::multiply::sm90
