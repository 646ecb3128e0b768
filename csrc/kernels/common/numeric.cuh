// Conversions between the operand types and the types of sums and norms.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace spamm::kernels {

// A float32 number whose products have TF32's precision: selects instructions in templates.
struct Tf32 {
  float value;
};

// The type of norms and sums: double for double operands, float for all others.
template <class Element>
using NormOf = std::conditional_t<std::is_same_v<Element, double>, double, float>;

__device__ inline float widen(__half x) { return __half2float(x); }
__device__ inline float widen(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ inline float widen(float x) { return x; }
__device__ inline double widen(double x) { return x; }

// Rounds to nearest even.
template <class Element>
__device__ Element narrow(NormOf<Element> x) {
  if constexpr (std::is_same_v<Element, __half>) {
    return __float2half_rn(x);
  } else if constexpr (std::is_same_v<Element, __nv_bfloat16>) {
    return __float2bfloat16_rn(x);
  } else {
    return x;
  }
}

// The bits of magnitudes, which have the order of the numbers. Infinity is above them, and NaN
// above infinity.
template <class Norm>
struct Bits {
  using Type = std::conditional_t<sizeof(Norm) == 4, uint32_t, unsigned long long>;
  static constexpr Type kInfinity = sizeof(Norm) == 4 ? 0x7f800000 : 0x7ff0000000000000;
  __device__ static Type of_magnitude(Norm x) {
    return __builtin_bit_cast(Type, x) & ~Type{0} >> 1;
  }
  __device__ static Norm to(Type bits) { return __builtin_bit_cast(Norm, bits); }
};

// Clamps an exponent to those of normal float32 numbers.
__device__ inline int normal_exponent(int exponent) { return min(max(exponent, -126), 127); }

// 2^exponent, for an exponent from -126 to 127.
__device__ inline float power_of_two(int exponent) {
  return __int_as_float((exponent + 127) << 23);
}

}  // namespace spamm::kernels
