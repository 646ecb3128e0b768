// Chunks of entries, and sums of their squares. Where these overflow or underflow, the entries are
// scaled by the power of two of the largest one.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/common/numeric.cuh"
#include "kernels/common/ptx_sm80.cuh"

namespace spamm::kernels {

// Tells whether a sum of up to 2^14 squares has suffered neither overflow nor underflow.
template <class Norm>
__device__ bool is_safe(Norm sum) {
  constexpr bool kWide = sizeof(Norm) == 8;
  constexpr Norm kLeast = kWide ? 0x1p-960 : 0x1p-90, kMost = kWide ? 0x1p1023 : 0x1p127;
  return sum >= kLeast && sum <= kMost;
}

// The scaled sum and its norm. `largest` is the largest magnitude, or NaN if an entry is NaN.
template <class Norm>
class ScaledNorm {
 public:
  __device__ explicit ScaledNorm(Norm largest)
      : largest_(largest),
        is_number_(isfinite(largest) && largest > 0),
        exponent_(is_number_ ? ilogb(largest) : 0) {}

  // If false, nothing needs to be added: the norm is zero, infinite or NaN.
  __device__ bool is_number() const { return is_number_; }

  __device__ Norm add(Norm sum, Norm entry) const {
    const Norm scaled = scalbn(entry, -exponent_);
    return fma(scaled, scaled, sum);
  }

  __device__ Norm norm(Norm sum) const {
    return is_number_ ? scalbn(sqrt(sum), exponent_) : largest_;
  }

 private:
  Norm largest_;
  bool is_number_;
  int exponent_;
};

constexpr int kChain = 4;  // chunks whose squares are summed before they are added to a lane's sum

// One chunk of a line. Entries are extracted from whole words, so that it stays in registers.
template <class Element>
struct alignas(16) Chunk {
  using EntryBits =
      std::conditional_t<sizeof(Element) == 2, uint16_t,
                         std::conditional_t<sizeof(Element) == 4, uint32_t, uint64_t>>;
  static constexpr int kEntries = 16 / sizeof(Element), kPerWord = 4 / sizeof(Element);
  uint32_t words[4];

  __device__ Element entry(int i) const {
    EntryBits bits;
    if constexpr (sizeof(Element) == 8) {
      bits = static_cast<uint64_t>(words[2 * i + 1]) << 32 | words[2 * i];
    } else {
      bits = static_cast<EntryBits>(words[i / kPerWord] >> i % kPerWord * 16);
    }
    return __builtin_bit_cast(Element, bits);
  }

  // Sets an entry that is zero.
  __device__ void set(int i, Element x) {
    const auto bits = __builtin_bit_cast(EntryBits, x);
    if constexpr (sizeof(Element) == 8) {
      words[2 * i] = static_cast<uint32_t>(bits);
      words[2 * i + 1] = static_cast<uint32_t>(bits >> 32);
    } else {
      words[i / kPerWord] |= static_cast<uint32_t>(bits) << i % kPerWord * 16;
    }
  }
};

// Tells whether any entry of several chunks is not zero, found from the bits. -0 counts as zero.
template <class Element>
struct AnyNonzero {
  uint32_t even = 0, odd = 0;

  __device__ void add(const Chunk<Element>& chunk) {
    even |= chunk.words[0] | chunk.words[2];
    odd |= chunk.words[1] | chunk.words[3];
  }

  __device__ bool found() const {
    if constexpr (sizeof(Element) == 8) return (even | (odd & 0x7fffffff)) != 0;
    return ((even | odd) & (sizeof(Element) == 4 ? 0x7fffffff : 0x7fff7fff)) != 0;
  }
};

// The sum of the squares of kChain chunks of each lane, spread over the warp.
template <class Element>
__device__ NormOf<Element> chain_of_squares(const Chunk<Element>* chunks) {
  if constexpr (sizeof(Element) == 2) {
    // As operand A a chunk is 16 x 16: its even words are rows 0 to 7, its odd words rows 8 to 15.
    // With the even words as operand B too, entry (g, g) of `top` is the sum of squares of lanes 4g
    // to 4g + 3. With the odd words, it is entry (g + 8, g) of `bottom`.
    float top[4] = {}, bottom[4] = {};
#pragma unroll
    for (int i = 0; i < kChain; ++i) {
      const auto& [x0, x1, x2, x3] = chunks[i].words;
      if constexpr (std::is_same_v<Element, __half>) {
        mma_f16(top, x0, x1, x2, x3, x0, x2);
        mma_f16(bottom, x0, x1, x2, x3, x1, x3);
      } else {
        mma_bf16(top, x0, x1, x2, x3, x0, x2);
        mma_bf16(bottom, x0, x1, x2, x3, x1, x3);
      }
    }
    const int lane = threadIdx.x % 32, row = lane / 4;
    const bool odd = row % 2;
    return lane % 4 == row / 2 ? (odd ? top[1] : top[0]) + (odd ? bottom[3] : bottom[2]) : 0.0f;
  } else {
    // One sum for each entry of a chunk keeps the chains of roundings short.
    NormOf<Element> sums[Chunk<Element>::kEntries] = {}, sum = 0;
#pragma unroll
    for (int i = 0; i < kChain; ++i) {
#pragma unroll
      for (int e = 0; e < Chunk<Element>::kEntries; ++e) {
        sums[e] = fma(chunks[i].entry(e), chunks[i].entry(e), sums[e]);
      }
    }
#pragma unroll
    for (const auto x : sums) sum += x;
    return sum;
  }
}

}  // namespace spamm::kernels
