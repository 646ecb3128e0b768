// The end of a tile in the Hopper convolution: sums plus bias, rectified if asked for, rounded, by
// way of shared memory to the output. A warpgroup's sums hold a channel in each row; the output has
// its channels last, so that they are transposed on the way.
#pragma once

#include <cute/arch/copy_sm90.hpp>
#include <cute/arch/copy_sm90_tma.hpp>

#include "conv_pipeline_sm90.cuh"
#include "numeric.cuh"

namespace spamm::kernels::conv {

// As torch's relu: a NaN stays.
__device__ __forceinline__ float rectified(float x) { return x < 0 ? 0 : x; }

// The biases of the two channels whose sums a thread holds.
struct ChannelBias {
  float values[2] = {0, 0};

  template <class Element>
  __device__ void load(const ConvParams& p, int first_channel, const Element* bias) {
    if (bias == nullptr) return;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4 + i * 8;
      const int channel = first_channel + row;
      if (channel < p.shape.out_channels) values[i] = widen(bias[channel]);
    }
  }
};

template <class Element>
__device__ __forceinline__ uint32_t rounded_pair(float low, float high) {
  const Element pair[2] = {narrow<Element>(low), narrow<Element>(high)};
  return static_cast<uint32_t>(__builtin_bit_cast(uint16_t, pair[1])) << 16 |
         __builtin_bit_cast(uint16_t, pair[0]);
}

// The two neighbouring pixels of a channel, `i` of the thread's two, as they are stored.
template <class Element, int kSize>
__device__ __forceinline__ uint32_t finished_pair(const float (&acc)[kSize], int from, int i,
                                                  const ChannelBias& bias, bool relu) {
  float low = acc[from] + bias.values[i], high = acc[from + 1] + bias.values[i];
  if (relu) {
    low = rectified(low);
    high = rectified(high);
  }
  return rounded_pair<Element>(low, high);
}

template <class Element>
__device__ __forceinline__ void add_squares(SquareSum<Element>& sum, uint32_t pair) {
  using Sum = SquareSum<Element>;
  const Sum low = widen(__builtin_bit_cast(Element, static_cast<uint16_t>(pair)));
  const Sum high = widen(__builtin_bit_cast(Element, static_cast<uint16_t>(pair >> 16)));
  sum = fma(high, high, fma(low, low, sum));
}

// Puts kColumns pixels x 64 channels, values from kFirst on, into a block of lines of 64 channels,
// as TMA's 128-byte swizzle wants them. Returns, kSquares, the thread's share of the sum of squares
// over the first `existing` pixels.
template <class Element, int kColumns, int kFirst, bool kSquares, int kSize>
__device__ __forceinline__ SquareSum<Element> stage(const float (&acc)[kSize],
                                                    const ChannelBias& bias, bool relu,
                                                    int existing, OperandBlock& block) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
  const int line = lane / 16 * 8 + lane % 8, chunk = (2 * warp + lane / 8 % 2) ^ lane % 8;
  uint8_t* target = block.bytes + line * kLineBytes + chunk * 16;
  SquareSum<Element> sum = 0;
#pragma unroll
  for (int column = 0; column < kColumns; column += 16) {
    uint32_t pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int first = column + i / 2 * 8;
      if (first >= kColumns) continue;
      pairs[i] = finished_pair<Element>(acc, kFirst + column / 2 + 2 * i, i % 2, bias, relu);
      if constexpr (kSquares) {
        // As a mask, since lanes that part ways here would meet too late for what follows.
        const int left = existing - (first + lane % 4 * 2);
        const uint32_t kept =
            ~0u >> 16 * min(max(2 - left, 0), 1) & -static_cast<uint32_t>(left > 0);
        add_squares<Element>(sum, pairs[i] & kept);
      }
    }
    auto* lines = reinterpret_cast<cute::uint128_t*>(target + column * kLineBytes);
    if (column + 8 < kColumns) {
      cute::SM90_U16x8_STSM_T::copy(pairs[0], pairs[1], pairs[2], pairs[3], *lines);
    } else {
      cute::SM90_U16x4_STSM_T::copy(pairs[0], pairs[1], *lines);
    }
  }
  return sum;
}

// The sum over a warpgroup of what its warps leave, each in its own place.
template <class Sum>
__device__ __forceinline__ void leave_sum(Sum sum, Sum (&warps)[4]) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    sum += __shfl_xor_sync(~0u, sum, distance);
  }
  if (threadIdx.x % 32 == 0) warps[threadIdx.x % 128 / 32] = sum;
}

// The norm of 64 channels of a box, for the next layer.
template <class Sum>
__device__ __forceinline__ void store_norm(const ConvParams& p, int channel, const Box& box,
                                           Sum sum) {
  if (box.image >= p.shape.output.images || box.column >= p.shape.output.columns ||
      channel >= p.shape.out_channels) {
    return;
  }
  const int64_t line = static_cast<int64_t>(box.image / kBlock) * p.shape.output.rows + box.row;
  const int groups = (p.shape.out_channels - 1) / kBlock + 1;
  p.norm_output[(line * p.shape.output.columns + box.column) * groups + channel / kBlock] =
      sqrt(sum);
}

// Stores a warpgroup's boxes and, kNorms, their norms.
template <class Config, bool kNorms, int kBox = 0>
__device__ __forceinline__ void store_boxes(const ConvParams& p, int channel, const Box* boxes,
                                            OperandBlock& staging,
                                            SquareSum<typename Config::Element> (&sums)[4],
                                            const ChannelBias& bias,
                                            const float (&acc)[Config::kValues]) {
  if constexpr (kBox < 2) {
    constexpr int kColumns = kBox == 0 ? kBlock : Config::kLastWidth;
    const bool leads = threadIdx.x % 128 == 0;
    const int warpgroup = threadIdx.x / 128;
    const Box& box = boxes[kBox];
    if (leads) cute::tma_store_wait<0>();  // the box before has left shared memory
    cutlass::arch::NamedBarrier::sync(128, warpgroup);
    const auto squares = stage<typename Config::Element, kColumns, kBox * kBlock / 2, kNorms>(
        acc, bias, p.relu, p.shape.output.images - box.image, staging);
    if constexpr (kNorms) leave_sum(squares, sums);
    cute::tma_store_fence();
    cutlass::arch::NamedBarrier::sync(128, warpgroup);
    if (leads) {
      cute::SM90_TMA_STORE_4D::copy(&p.map_output, &staging, channel, box.column, box.row,
                                    box.image);
      cute::tma_store_arrive();
      if constexpr (kNorms) store_norm(p, channel, box, (sums[0] + sums[1]) + (sums[2] + sums[3]));
    }
    store_boxes<Config, kNorms, kBox + 1>(p, channel, boxes, staging, sums, bias, acc);
  }
}

template <class Config>
__device__ __forceinline__ void store(const ConvParams& p, int channel, const Box* boxes,
                                      OperandBlock& staging,
                                      SquareSum<typename Config::Element> (&sums)[4],
                                      const ChannelBias& bias,
                                      const float (&acc)[Config::kValues]) {
  if (p.norm_output != nullptr) {
    store_boxes<Config, true>(p, channel, boxes, staging, sums, bias, acc);
  } else {
    store_boxes<Config, false>(p, channel, boxes, staging, sums, bias, acc);
  }
}

}  // namespace spamm::kernels::conv
