// The end of a tile in the Hopper convolution: sums plus bias, rectified if asked for, rounded, by
// way of shared memory to the output. A warpgroup's sums hold a channel in each row; the output has
// its channels last, so that they are transposed on the way.
#pragma once

#include <cute/arch/copy_sm90.hpp>
#include <cute/arch/copy_sm90_tma.hpp>

#include "kernels/common/numeric.cuh"
#include "kernels/conv/sm90/pipeline.cuh"

namespace spamm::kernels::conv::sm90 {

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

__device__ __forceinline__ __half2 rounded_pair(float low, float high, __half) {
  return __floats2half2_rn(low, high);
}
__device__ __forceinline__ __nv_bfloat162 rounded_pair(float low, float high, __nv_bfloat16) {
  return __floats2bfloat162_rn(low, high);
}

// Two values as they are stored.
template <class Element>
__device__ __forceinline__ uint32_t finished_pair(float low, float high, bool relu) {
  // As torch's relu: a NaN stays. One instruction for both, either way.
  const float least = relu ? 0 : -INFINITY;
  const auto result =
      __hmax2_nan(rounded_pair(low, high, Element()), rounded_pair(least, least, Element()));
  return reinterpret_cast<const uint32_t&>(result);
}

// sum += x^2 if `number` < `count`: under a predicate, since lanes that part ways here would meet
// too late for what follows.
__device__ __forceinline__ void add_square_below(float& sum, float x, int number, int count) {
  asm("{\n.reg .pred counts;\nsetp.lt.s32 counts, %2, %3;\n"
      "@counts fma.rn.f32 %0, %1, %1, %0;\n}"
      : "+f"(sum)
      : "f"(x), "r"(number), "r"(count));
}
__device__ __forceinline__ void add_square_below(double& sum, double x, int number, int count) {
  asm("{\n.reg .pred counts;\nsetp.lt.s32 counts, %2, %3;\n"
      "@counts fma.rn.f64 %0, %1, %1, %0;\n}"
      : "+d"(sum)
      : "d"(x), "r"(number), "r"(count));
}

// The squares of the numbers `first` and the one after, of `count`.
template <class Element>
__device__ __forceinline__ void add_squares(SquareSum<Element> (&sums)[2], uint32_t pair, int first,
                                            int count) {
  const auto low = __builtin_bit_cast(Element, static_cast<uint16_t>(pair));
  const auto high = __builtin_bit_cast(Element, static_cast<uint16_t>(pair >> 16));
  add_square_below(sums[0], widen(low), first, count);
  add_square_below(sums[1], widen(high), first + 1, count);
}

// Puts kColumns pixels x 64 channels, values from kFirst on, into a block of lines of 64 channels,
// as TMA's 128-byte swizzle wants them, and into `pairs`.
template <class Element, int kColumns, int kFirst, int kSize>
__device__ __forceinline__ void stage(const float (&acc)[kSize], const ChannelBias& bias, bool relu,
                                      OperandBlock& block, uint32_t (&pairs)[kColumns / 4]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
  const int line = lane / 16 * 8 + lane % 8, chunk = (2 * warp + lane / 8 % 2) ^ lane % 8;
  uint8_t* target = block.bytes + line * kLineBytes + chunk * 16;
#pragma unroll
  for (int i = 0; i < kColumns / 4; ++i) {
    // Two neighbouring pixels of a channel, one of the thread's two.
    const int from = kFirst + 2 * i;
    pairs[i] = finished_pair<Element>(acc[from] + bias.values[i % 2],
                                      acc[from + 1] + bias.values[i % 2], relu);
  }
#pragma unroll
  for (int column = 0; column < kColumns; column += 16) {
    auto* lines = reinterpret_cast<cute::uint128_t*>(target + column * kLineBytes);
    const uint32_t* of_lines = pairs + column / 4;
    if (column + 8 < kColumns) {
      cute::SM90_U16x8_STSM_T::copy(of_lines[0], of_lines[1], of_lines[2], of_lines[3], *lines);
    } else {
      cute::SM90_U16x4_STSM_T::copy(of_lines[0], of_lines[1], *lines);
    }
  }
}

// A thread's share of the sum of squares over the first `existing` pixels, of pairs as staged.
template <class Element, int kPairs>
__device__ __forceinline__ SquareSum<Element> sum_of_squares(const uint32_t (&pairs)[kPairs],
                                                             int existing) {
  SquareSum<Element> sums[2] = {};  // short chains
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    add_squares<Element>(sums, pairs[i], i / 2 * 8, existing - threadIdx.x % 4 * 2);
  }
  return sums[0] + sums[1];
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

// Stores a warpgroup's box number kBox, as the pairs that it returns.
template <class Config, int kBox, int kPairs>
__device__ __forceinline__ void store_box(const ConvParams& p, int channel, const Box& box,
                                          OperandBlock& staging, const ChannelBias& bias,
                                          const float (&acc)[Config::kValues],
                                          uint32_t (&pairs)[kPairs]) {
  const bool leads = threadIdx.x % 128 == 0;
  const int warpgroup = threadIdx.x / 128;
  if (leads) cute::tma_store_wait<0>();  // the box before has left shared memory
  cutlass::arch::NamedBarrier::sync(128, warpgroup);
  stage<typename Config::Element, kPairs * 4, kBox * kBlock / 2>(acc, bias, p.relu, staging, pairs);
  cute::tma_store_fence();
  cutlass::arch::NamedBarrier::sync(128, warpgroup);
  if (leads) {
    cute::SM90_TMA_STORE_4D::copy(&p.map_output, &staging, channel, box.column, box.row, box.image);
    cute::tma_store_arrive();
  }
}

// Stores the norms of a warpgroup's boxes, of the threads' shares of their squares.
template <class Element>
__device__ __forceinline__ void store_norms(const ConvParams& p, int channel, const Box* boxes,
                                            SquareSum<Element> (&squares)[2],
                                            BoxSquares<Element>& shared) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
#pragma unroll
    for (auto& sum : squares) sum += __shfl_xor_sync(~0u, sum, distance);
  }
  if (threadIdx.x % 32 == 0) {
#pragma unroll
    for (int i = 0; i < 2; ++i) shared.of_warps[i][threadIdx.x % 128 / 32] = squares[i];
  }
  cutlass::arch::NamedBarrier::sync(128, threadIdx.x / 128);
  if (threadIdx.x % 128 == 0) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const auto& sums = shared.of_warps[i];
      store_norm(p, channel, boxes[i], (sums[0] + sums[1]) + (sums[2] + sums[3]));
    }
  }
}

template <class Config>
__device__ __forceinline__ void store(const ConvParams& p, int channel, const Box* boxes,
                                      OperandBlock& staging,
                                      BoxSquares<typename Config::Element>& shared,
                                      const ChannelBias& bias,
                                      const float (&acc)[Config::kValues]) {
  using Element = typename Config::Element;
  uint32_t first[kBlock / 4], second[Config::kLastWidth / 4];
  store_box<Config, 0>(p, channel, boxes[0], staging, bias, acc, first);
  store_box<Config, 1>(p, channel, boxes[1], staging, bias, acc, second);
  if (p.norm_output == nullptr) return;
  SquareSum<Element> squares[2] = {
      sum_of_squares<Element>(first, p.shape.output.images - boxes[0].image),
      sum_of_squares<Element>(second, p.shape.output.images - boxes[1].image)};
  store_norms<Element>(p, channel, boxes, squares, shared);
}

}  // namespace spamm::kernels::conv::sm90
