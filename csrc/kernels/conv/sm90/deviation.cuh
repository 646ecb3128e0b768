// What the Hopper convolution makes of sums of deviations from a reference: activation(sums + base)
// - activation(base), in float32. The load warps bring the base into the ring as the last step of a
// tile, so that it is on its way while the products run. Output blocks without a product and
// without a residual have no such step: their sums are zero, and so is the result.
#pragma once

#include "kernels/common/activation.cuh"
#include "kernels/conv/sm90/residual.cuh"

namespace spamm::kernels::conv::sm90 {

template <class Config>
__device__ __forceinline__ bool is_base(Notice notice) {
  return Config::kDeviates && notice.is_base();
}

// Calls change(sum, x) for the thread's sums of 64 pixels, from value kFirst on, and the entries x
// of a box of float32. The box has 32 channels: those of warps 2 * part and 2 * part + 1.
template <int kFirst, int kSize, class Change>
__device__ __forceinline__ void change_half_box(const OperandBlock& block, int part,
                                                float (&acc)[kSize], const Change& change) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
  if (warp / 2 != part) return;
  const uint8_t* sources[4];  // two neighbouring pixels of the first channel, then of the second
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int line = lane % 4 * 2 + i % 2, chunk = warp % 2 * 4 + i / 2 * 2 + lane / 16;
    sources[i] = block.bytes + line * kLineBytes + (chunk ^ line) * 16 + lane / 4 % 4 * 4;
  }
#pragma unroll
  for (int i = 0; i < kBlock / 2; ++i) {
    change(acc[kFirst + i],
           *reinterpret_cast<const float*>(sources[i % 4] + i / 4 * 8 * kLineBytes));
  }
}

template <class Config, int kFirst, class Change>
__device__ __forceinline__ void change_sums(const OperandBlock& box, int part,
                                            float (&acc)[Config::kValues], const Change& change) {
  if constexpr (Config::kParts == 1) {
    change_box<typename Config::Element, kBlock, kFirst>(box, acc, change);
  } else {
    change_half_box<kFirst>(box, part, acc, change);
  }
}

// Turns the sums of a warpgroup's boxes whose bits are set into deviations. `part`: of 64 channels,
// those of the stage.
template <class Config>
__device__ __forceinline__ void deviate(Activation activation, uint32_t bits, int part,
                                        const OperandBlock* boxes, float (&acc)[Config::kValues]) {
  with_activation(activation, [&](auto function) {
    // Without a fused multiply-add, with which a sum of zero would not give zero.
    const auto change = [&](float& sum, float base) {
      sum = __fsub_rn(function(sum + base), function(base));
    };
    if (bits & 1) change_sums<Config, 0>(boxes[0], part, acc, change);
    if (bits & 2) change_sums<Config, kBlock / 2>(boxes[1], part, acc, change);
  });
}

}  // namespace spamm::kernels::conv::sm90
