// Conversions between float32 and the half types. They use integer arithmetic, which vectorises for
// any instruction set, unlike c10's conversions. Narrowing rounds to nearest, ties to even.
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <type_traits>

#include "cpu/common/machine.h"

namespace spamm::cpu {

// The unsigned integer of an element's size.
template <class T>
using UnsignedOf = std::conditional_t<sizeof(T) == 2, uint16_t,
                                      std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>>;

SPAMM_INLINE float widen(c10::BFloat16 value) {
  return std::bit_cast<float>(static_cast<uint32_t>(value.x) << 16);
}

// A subnormal float16 is first added to 2^-14 in the bits of a normal float32, then 2^-14 is
// subtracted. Both steps are exact. Neither uses a subnormal float32, which the processor may be
// set to flush to zero. Of other numbers, zero is subtracted. Masks in place of choices: gcc would
// make these branches, and loops with branches do not vectorise.
SPAMM_INLINE float widen(c10::Half value) {
  constexpr uint32_t kOne = 1u << 23;  // one step of a float32's exponent
  const uint32_t sign = (value.x & 0x8000u) << 16;
  const uint32_t magnitude = (value.x & 0x7fffu) << 13;
  const uint32_t special = -static_cast<uint32_t>(magnitude >= 31 * kOne) & (112 * kOne);
  const uint32_t excess = -static_cast<uint32_t>(magnitude < kOne) & (113 * kOne);  // 2^-14
  const uint32_t bits = magnitude + std::max(excess, 112 * kOne) + special;
  const float wide = std::bit_cast<float>(bits) - std::bit_cast<float>(excess);
  return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(wide));
}

SPAMM_INLINE float widen(float value) { return value; }
SPAMM_INLINE double widen(double value) { return value; }

template <class T, class From>
SPAMM_INLINE T narrow(From value) {
  static_assert(std::is_same_v<T, From>);
  return value;
}

template <>
SPAMM_INLINE c10::BFloat16 narrow<c10::BFloat16>(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t result = value != value ? 0x7fc0u : rounded;
  return {static_cast<uint16_t>(result), c10::BFloat16::from_bits()};
}

template <>
SPAMM_INLINE c10::Half narrow<c10::Half>(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  constexpr uint32_t kLeastNormal = 113u << 23;  // 2^-14
  constexpr uint32_t kOverflow = 0x477ff000u;    // 65520 and above round to infinity
  const uint32_t special = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
  const uint32_t normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  // The last bit of a float32 just above 1/2 is worth 2^-24, the smallest float16.
  const uint32_t subnormal = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) -
                             std::bit_cast<uint32_t>(0.5f);
  const uint32_t finite = magnitude < kLeastNormal ? subnormal : normal;
  const uint32_t result = sign | (magnitude >= kOverflow ? special : finite);
  return {static_cast<uint16_t>(result), c10::Half::from_bits()};
}

}  // namespace spamm::cpu
