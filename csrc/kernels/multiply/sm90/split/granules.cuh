// Granules of 32 x 32 x 32 of a step, for blocks with edges of 32. A block of C has eight bits for
// a step: the four granules of its first half of K, then the second; in each half the two rows of
// the first column, then the second (pipeline.cuh).
#pragma once

#include "kernels/multiply/sm90/split/stage.cuh"

namespace spamm::kernels::multiply::sm90 {

constexpr int kGranuleValues = kThreadValues / 2;  // sums of a granule in each of its threads

// The row of granules that this thread's sums belong to.
__device__ __forceinline__ int own_row() { return threadIdx.x % 128 / 64; }

// Whether the bits of a half contain the granule of this thread's row in `column`.
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

}  // namespace spamm::kernels::multiply::sm90
