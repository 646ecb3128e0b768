// The activations of an epilogue, in float32. All keep NaN, as torch's do.
#pragma once

#include <cuda_runtime.h>

#include "activation.h"

namespace spamm::kernels {

__device__ __forceinline__ float clamped(float x, float least, float most) {
  return x < least ? least : x > most ? most : x;
}
__device__ __forceinline__ float rectified(float x) { return x < 0 ? 0 : x; }
__device__ __forceinline__ float hardswish(float x) { return x * clamped(x + 3, 0, 6) / 6; }
__device__ __forceinline__ float silu(float x) { return x / (1 + __expf(-x)); }
__device__ __forceinline__ float leaky_relu(float x) { return x < 0 ? x * 0.01f : x; }

// Applies an activation to all values. It is chosen outside of the unrolled loops.
template <int kSize>
__device__ __forceinline__ void activate(Activation activation, float (&values)[kSize]) {
  const auto each = [&](auto function) {
#pragma unroll
    for (float& value : values) value = function(value);
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

}  // namespace spamm::kernels
