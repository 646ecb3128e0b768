// The activations of an epilogue, in float32. All keep NaN, as torch's do.
#pragma once

#include <cuda_runtime.h>

#include "activation.h"

namespace spamm::kernels {

__device__ __forceinline__ float clamped(float x, float least, float most) {
  return x < least ? least : x > most ? most : x;
}
__device__ __forceinline__ float rectified(float x) { return x < 0 ? 0 : x; }
// Both without a division that rounds correctly: it would be a call, which costs registers.
__device__ __forceinline__ float hardswish(float x) {
  return x * clamped(x + 3, 0, 6) * (1.0f / 6);
}
__device__ __forceinline__ float silu(float x) { return __fdividef(x, 1 + __expf(-x)); }
__device__ __forceinline__ float leaky_relu(float x) { return x < 0 ? x * 0.01f : x; }

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

// Applies an activation to all values.
template <int kSize>
__device__ __forceinline__ void activate(Activation activation, float (&values)[kSize]) {
  with_activation(activation, [&](auto function) {
#pragma unroll
    for (float& value : values) value = function(value);
  });
}

}  // namespace spamm::kernels
