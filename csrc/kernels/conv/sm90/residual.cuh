// Adds the residual to the sums of the Hopper convolution. The load warps bring it into the ring as
// a step of its own, so that it is on its way while the products run.
#pragma once

#include <cute/arch/copy_sm75.hpp>

#include "kernels/common/numeric.cuh"
#include "kernels/conv/sm90/pipeline.cuh"

namespace spamm::kernels::conv::sm90 {

// Calls change(sum, x) for the thread's sums of kColumns pixels x 64 channels, from value kFirst
// on, and the entries x of a box. The box has a line of 64 channels for each pixel, in TMA's
// 128-byte swizzle; it is transposed on the way, as stage() does.
template <class Element, int kColumns, int kFirst, int kSize, class Change>
__device__ __forceinline__ void change_box(const OperandBlock& block, float (&acc)[kSize],
                                           const Change& change) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
  const int line = lane / 16 * 8 + lane % 8, chunk = (2 * warp + lane / 8 % 2) ^ lane % 8;
  const uint8_t* source = block.bytes + line * kLineBytes + chunk * 16;
#pragma unroll
  for (int column = 0; column < kColumns; column += 16) {
    const auto& lines = *reinterpret_cast<const cute::uint128_t*>(source + column * kLineBytes);
    uint32_t pairs[4];
    cute::SM75_U16x8_LDSM_T::copy(lines, pairs[0], pairs[1], pairs[2], pairs[3]);
#pragma unroll
    for (int i = 0; i < 4 && column + i / 2 * 8 < kColumns; ++i) {
      float* const to = acc + kFirst + column / 2 + 2 * i;
      change(to[0], widen(__builtin_bit_cast(Element, static_cast<uint16_t>(pairs[i]))));
      change(to[1], widen(__builtin_bit_cast(Element, static_cast<uint16_t>(pairs[i] >> 16))));
    }
  }
}

// acc += those of a warpgroup's two boxes whose bits are set.
template <class Config>
__device__ __forceinline__ void add_residual(uint32_t bits, const OperandBlock* boxes,
                                             float (&acc)[Config::kValues]) {
  using Element = typename Config::Element;
  const auto add = [](float& sum, float x) { sum += x; };
  if (bits & 1) change_box<Element, kBlock, 0>(boxes[0], acc, add);
  if (bits & 2) change_box<Element, Config::kLastWidth, kBlock / 2>(boxes[1], acc, add);
}

}  // namespace spamm::kernels::conv::sm90
