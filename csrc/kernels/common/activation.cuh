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
// Both without IEEE divisions, whose code for all values of a tile would fill the instruction
// cache.
__device__ __forceinline__ float hardswish(float x) {
  return x * clamped(x + 3, 0, 6) * (1.0f / 6);
}
__device__ __forceinline__ float silu(float x) { return __fdividef(x, 1 + __expf(-x)); }
__device__ __forceinline__ float leaky_relu(float x) { return x < 0 ? x * 0.01f : x; }

static_assert(kActivations.size() == 6, "with_activation has a case for each");

// Calls use() with the activation as a function, or not at all for kNone. So it is chosen outside
// of unrolled loops.
template <class Use>
__device__ __forceinline__ void with_activation(Activation activation, const Use& use) {
  switch (activation) {
    case Activation::kNone:
      return;
    case Activation::kRelu:
      return use([](float x) { return rectified(x); });
    case Activation::kRelu6:
      return use([](float x) { return clamped(x, 0, 6); });
    case Activation::kHardswish:
      return use([](float x) { return hardswish(x); });
    case Activation::kSilu:
      return use([](float x) { return silu(x); });
    case Activation::kLeakyRelu:
      return use([](float x) { return leaky_relu(x); });
  }
}

// Applies an activation to all values, and asks for each group which one. If it were asked once,
// the compiler would compute all values side by side, in registers that other thread blocks need.
template <int kSize>
__device__ __forceinline__ void activate(Activation activation, float (&values)[kSize]) {
  constexpr int kGroup = std::gcd(kSize, 8);
  auto chosen = static_cast<int>(activation);
#pragma unroll
  for (int first = 0; first < kSize; first += kGroup) {
    asm volatile("" : "+r"(chosen));  // hides that it is the same for all groups
    with_activation(static_cast<Activation>(chosen), [&](auto function) {
#pragma unroll
      for (int i = first; i < first + kGroup; ++i) values[i] = function(values[i]);
    });
  }
}

}  // namespace spamm::kernels
