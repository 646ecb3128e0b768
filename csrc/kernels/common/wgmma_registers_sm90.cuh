// Warpgroup products with A from registers: 64 x 64 of C from 16 of K, half types, float32 sums.
#pragma once

#include "kernels/common/wgmma_sm90.cuh"

namespace spamm::kernels::sm90 {

template <class Element>
struct RegisterAtom;
template <>
struct RegisterAtom<__half> {
  using Type = cute::SM90::GMMA::MMA_64x64x16_F32F16F16_RS<Major::K, Major::K>;
};
template <>
struct RegisterAtom<__nv_bfloat16> {
  using Type = cute::SM90::GMMA::MMA_64x64x16_F32BF16BF16_RS<Major::K, Major::K>;
};

template <class Element, int... kIndex>
__device__ __forceinline__ void fma_registers(const uint32_t (&a)[4], uint64_t b,
                                              float (&acc)[kThreadValues], ScaleOut scale,
                                              std::integer_sequence<int, kIndex...>) {
  RegisterAtom<Element>::Type::fma(a[0], a[1], a[2], a[3], b, acc[kIndex]..., scale);
}

// acc += a b, or acc = a b if `scale` is Zero. `b` is the descriptor of 64 columns. Asynchronous:
// the caller fences before, and commits and waits after; until then it keeps `a` (keep_operands).
template <class Element>
__device__ __forceinline__ void multiply_registers(const uint32_t (&a)[4], uint64_t b,
                                                   float (&acc)[kThreadValues], ScaleOut scale) {
  fma_registers<Element>(a, b, acc, scale, std::make_integer_sequence<int, kThreadValues>{});
}

// Keeps registers that a product reads or writes from being used for something else before this.
template <int kSize>
__device__ __forceinline__ void keep_operands(uint32_t (&a)[kSize][4]) {
#pragma unroll
  for (auto& step : a) {
#pragma unroll
    for (uint32_t& word : step) cute::warpgroup_fence_operand(word);
  }
}

}  // namespace spamm::kernels::sm90
