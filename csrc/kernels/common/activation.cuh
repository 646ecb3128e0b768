// The activations of an epilogue, in float32. All keep NaN, as torch's do.
#pragma once

#include <cuda_runtime.h>

#include <numeric>

#include "activation.h"

namespace spamm::kernels {

__device__ __forceinline__ float clamped(float x, float least, float most) {
  return x < least ? least : x > most ? most : x;
}
__device__ __forceinline__ float rectified(float x) { return x < 0 ? 0 : x; }
// Without IEEE divisions, whose code for all values of a tile would fill the instruction cache.
__device__ __forceinline__ float hardswish(float x) { return x * clamped(x + 3, 0, 6) * (1.f / 6); }
__device__ __forceinline__ float silu(float x) { return __fdividef(x, 1 + __expf(-x)); }
__device__ __forceinline__ float leaky_relu(float x) { return x < 0 ? x * 0.01f : x; }

// Applies an activation to `kCount` values.
template <int kCount>
__device__ __forceinline__ void activate_group(Activation activation, float* values) {
  const auto each = [&](auto function) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) values[i] = function(values[i]);
  };
  switch (activation) {
    case Activation::kNone:
      return;
    case Activation::kRelu:
      return each([](float x) { return rectified(x); });
    case Activation::kRelu6:
      return each([](float x) { return clamped(x, 0, 6); });
    case Activation::kHardswish:
      return each([](float x) { return hardswish(x); });
    case Activation::kSilu:
      return each([](float x) { return silu(x); });
    case Activation::kLeakyRelu:
      return each([](float x) { return leaky_relu(x); });
  }
}

// Applies an activation to all values, and asks for each group which one. If it were asked once, the
// compiler would compute all values side by side, in registers that other thread blocks need.
template <int kSize>
__device__ __forceinline__ void activate(Activation activation, float (&values)[kSize]) {
  constexpr int kGroup = std::gcd(kSize, 8);
  auto chosen = static_cast<int>(activation);
#pragma unroll
  for (int first = 0; first < kSize; first += kGroup) {
    asm volatile("" : "+r"(chosen));  // hides that it is the same for all groups
    activate_group<kGroup>(static_cast<Activation>(chosen), values + first);
  }
}

}  // namespace spamm::kernels
