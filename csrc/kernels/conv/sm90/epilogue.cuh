// The epilogue of the Hopper convolution: adds the bias, applies the activation, rounds into shared
// memory and stores by TMA. Sums have a channel in each row, but the output has its channels last,
// so they are transposed on the way into shared memory.
#pragma once

#include <cuda_runtime.h>

#include <cute/arch/copy_sm75.hpp>
#include <cute/arch/copy_sm90.hpp>
#include <cute/arch/copy_sm90_tma.hpp>
#include <numeric>

#include "activation.h"
#include "kernels/common/numeric.cuh"
#include "kernels/conv/sm90/pipeline.cuh"

namespace spamm::kernels {

// ---- Activations -------------------------------------------------------------------------------

// In float32. All keep NaN, as torch's do.

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
__device__ __forceinline__ float leaky_relu(float x, float slope) { return x < 0 ? x * slope : x; }

static_assert(kActivations.size() == 6, "with_activation has a case for each");

// Calls use() with the activation as a function of a value and the slope of leaky_relu, or not at
// all for kNone. So it is chosen outside of unrolled loops.
template <class Use>
__device__ __forceinline__ void with_activation(Activation activation, const Use& use) {
  switch (activation) {
    case Activation::kNone:
      return;
    case Activation::kRelu:
      return use([](float x, float) { return rectified(x); });
    case Activation::kRelu6:
      return use([](float x, float) { return clamped(x, 0, 6); });
    case Activation::kHardswish:
      return use([](float x, float) { return hardswish(x); });
    case Activation::kSilu:
      return use([](float x, float) { return silu(x); });
    case Activation::kLeakyRelu:
      return use([](float x, float slope) { return leaky_relu(x, slope); });
  }
}

// Applies an activation to all values, and asks for each group which one. If it were asked once,
// the compiler would compute all values side by side, in registers that other thread blocks need.
// slope_of(i): the slope of value i.
template <int kSize, class SlopeOf>
__device__ __forceinline__ void activate(Activation activation, float (&values)[kSize],
                                         const SlopeOf& slope_of) {
  constexpr int kGroup = std::gcd(kSize, 8);
  auto chosen = static_cast<int>(activation);
#pragma unroll
  for (int first = 0; first < kSize; first += kGroup) {
    asm volatile("" : "+r"(chosen));  // hides that it is the same for all groups
    with_activation(static_cast<Activation>(chosen), [&](auto function) {
#pragma unroll
      for (int i = first; i < first + kGroup; ++i) values[i] = function(values[i], slope_of(i));
    });
  }
}

}  // namespace spamm::kernels

namespace spamm::kernels::conv::sm90 {

// Channel `i`, 0 or 1, of the two of which a thread holds sums.
__device__ __forceinline__ int channel_of_thread(int first_channel, int i) {
  return first_channel + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4 + i * 8;
}

// The biases and slopes of these channels, which are on their way together.
struct ChannelBias {
  float values[2] = {0, 0}, slopes[2];

  template <class Element>
  __device__ void load(const ConvOperands& p, int first_channel, const Element* bias) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int channel = channel_of_thread(first_channel, i);
      if (bias != nullptr && channel < p.shape.out_channels) values[i] = widen(bias[channel]);
      slopes[i] = p.slopes.of(channel, p.shape.out_channels);
    }
  }
};

// Adds the bias and applies an activation that does not commute with rounding. What is left for the
// rounded values is told by the result: whether to apply ReLU.
template <int kSize>
__device__ __forceinline__ bool activate_sums(Activation activation, ChannelBias& bias,
                                              float (&acc)[kSize]) {
  if (activation == Activation::kNone || activation == Activation::kRelu) {
    return activation == Activation::kRelu;
  }
#pragma unroll
  for (int i = 0; i < kSize; ++i) acc[i] += bias.values[i / 2 % 2];
  activate(activation, acc, [&](int i) { return bias.slopes[i / 2 % 2]; });
  bias = {};
  return false;
}

__device__ __forceinline__ __half2 rounded_pair(float low, float high, __half) {
  return __floats2half2_rn(low, high);
}
__device__ __forceinline__ __nv_bfloat162 rounded_pair(float low, float high, __nv_bfloat16) {
  return __floats2bfloat162_rn(low, high);
}

// Rounds two values and applies ReLU.
template <class Element>
__device__ __forceinline__ uint32_t finished_pair(float low, float high, bool relu) {
  // Keeps NaN, like torch's relu. Without ReLU the bound is -infinity, which avoids a branch.
  const float least = relu ? 0 : -INFINITY;
  const auto result =
      __hmax2_nan(rounded_pair(low, high, Element()), rounded_pair(least, least, Element()));
  return reinterpret_cast<const uint32_t&>(result);
}

// sum += x^2 if `number` < `count`. Predicated, because lanes that diverge at a branch here would
// reconverge too late for the warp instructions that follow.
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

// Adds the squares of two entries, numbers `first` and `first` + 1, if they are below `count`.
template <class Element>
__device__ __forceinline__ void add_squares(SquareSum<Element> (&sums)[2], uint32_t pair, int first,
                                            int count) {
  const auto low = __builtin_bit_cast(Element, static_cast<uint16_t>(pair));
  const auto high = __builtin_bit_cast(Element, static_cast<uint16_t>(pair >> 16));
  add_square_below(sums[0], widen(low), first, count);
  add_square_below(sums[1], widen(high), first + 1, count);
}

// Rounds the values of kPairs * 4 pixels x 64 channels, from kFirst on, into `pairs`.
template <class Element, int kFirst, int kSize, int kPairs>
__device__ __forceinline__ void finish_pairs(const float (&acc)[kSize], const ChannelBias& bias,
                                             bool relu, uint32_t (&pairs)[kPairs]) {
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    // Two neighbouring pixels of one of the thread's two channels.
    const int from = kFirst + 2 * i;
    pairs[i] = finished_pair<Element>(acc[from] + bias.values[i % 2],
                                      acc[from + 1] + bias.values[i % 2], relu);
  }
}

// Stages these pairs in a block with a line of 64 channels for each pixel, in TMA's 128-byte
// swizzle.
template <int kPairs>
__device__ __forceinline__ void stage_pairs(const uint32_t (&pairs)[kPairs], OperandBlock& block) {
  constexpr int kColumns = kPairs * 4;
  const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
  const int line = lane / 16 * 8 + lane % 8, chunk = (2 * warp + lane / 8 % 2) ^ lane % 8;
  uint8_t* target = block.bytes + line * kLineBytes + chunk * 16;
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

// The number of pixels of a box that the norm counts of each of a thread's two channels: none of a
// channel that does not exist, whose sums are NaN where the input is infinite.
struct PixelCounts {
  int values[2];

  __device__ PixelCounts(const ConvOperands& p, int first_channel, const Box& box) {
    const int existing = p.shape.output.images - box.image;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      values[i] = channel_of_thread(first_channel, i) < p.shape.out_channels ? existing : 0;
    }
  }
};

// A thread's part of the sum of squares of the staged pairs.
template <class Element, int kPairs>
__device__ __forceinline__ SquareSum<Element> sum_of_squares(const uint32_t (&pairs)[kPairs],
                                                             const PixelCounts& counts) {
  SquareSum<Element> sums[2] = {};  // short chains
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    add_squares<Element>(sums, pairs[i], i / 2 * 8, counts.values[i % 2] - threadIdx.x % 4 * 2);
  }
  return sums[0] + sums[1];
}

// Stores the output norm of one channel group of a box.
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

// The sum of the squares of four words of a staged line.
template <class Element>
__device__ __forceinline__ SquareSum<Element> squares_of(const uint4& words) {
  SquareSum<Element> sum = 0;
  const auto add = [&](Element x) {
    const SquareSum<Element> wide = widen(x);
    sum = fma(wide, wide, sum);
  };
  for (const uint32_t word : {words.x, words.y, words.z, words.w}) {
    if constexpr (sizeof(Element) == 4) {
      add(__builtin_bit_cast(Element, word));
    } else {
      add(__builtin_bit_cast(Element, static_cast<uint16_t>(word)));
      add(__builtin_bit_cast(Element, static_cast<uint16_t>(word >> 16)));
    }
  }
  return sum;
}

// Stores the output norms of a box of several pixels that holds all images, half types: a norm is
// that of all images of a pixel (takes_norms_of_pixels). The box is staged in TMA's 128-byte
// swizzle; the caller has synchronised behind the staging, and does so before the next.
template <class Element>
__device__ __forceinline__ void store_norms_of_pixels(const ConvParams& p, int channel,
                                                      const Box& box, const OperandBlock& staged) {
  if (p.norm_output == nullptr) return;
  // Neighbouring threads share a pixel, which has 8 chunks of each image. A thread adds up four.
  const int log2_pixels = p.box.columns + p.box.rows, log2_threads = 7 - log2_pixels;
  const int thread = threadIdx.x % 128, pixel = thread >> log2_threads;
  const int images = p.shape.output.images - box.image;
  SquareSum<Element> sum = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int number = (thread & ((1 << log2_threads) - 1)) * 4 + i, image = number / 8;
    const int line = image << log2_pixels | pixel, chunk = (number ^ line) % 8;
    const uint8_t* const from = staged.bytes + line * kLineBytes + chunk * 16;
    const bool exists = image < images && channel + number % 8 * 8 < p.shape.out_channels;
    if (exists) sum += squares_of<Element>(*reinterpret_cast<const uint4*>(from));
  }
  __syncwarp();
  for (int distance = 1 << log2_threads >> 1; distance > 0; distance /= 2) {
    sum += __shfl_xor_sync(~0u, sum, distance);
  }
  const Extent& output = p.shape.output;
  const int column = box.column + (pixel & ((1 << p.box.columns) - 1));
  const int row = box.row + (pixel >> p.box.columns);
  if ((thread & ((1 << log2_threads) - 1)) != 0 || images <= 0 || row >= output.rows ||
      column >= output.columns || channel >= p.shape.out_channels) {
    return;
  }
  const int groups = (p.shape.out_channels - 1) / kBlock + 1;
  const int64_t place = static_cast<int64_t>(row) * output.columns + column;
  p.norm_output[place * groups + channel / kBlock] = static_cast<float>(sqrt(sum));
}

// Stores boxes of a warpgroup, whose rounded values are `pairs`, through a staging block each.
template <class Config, class... Pairs>
__device__ __forceinline__ void store_boxes(const ConvParams& p, int channel, const Box* boxes,
                                            OperandBlock* stagings, const Pairs&... pairs) {
  constexpr int kCount = sizeof...(Pairs);
  const int warpgroup = threadIdx.x / 128, thread = threadIdx.x % 128;
  // A warp stores each box, and waits until its previous store has read shared memory.
  if (thread % 32 == 0 && thread < kCount * 32) cute::tma_store_wait<0>();
  cutlass::arch::NamedBarrier::sync(128, warpgroup);
  int staged = 0;
  (stage_pairs(pairs, stagings[staged++]), ...);
  cute::tma_store_fence();
  cutlass::arch::NamedBarrier::sync(128, warpgroup);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (thread == i * 32) {
      cute::SM90_TMA_STORE_4D::copy(&p.map_output, &stagings[i], channel, boxes[i].column,
                                    boxes[i].row, boxes[i].image);
      cute::tma_store_arrive();
    }
    if constexpr (Config::kByPixel) {
      store_norms_of_pixels<typename Config::Element>(p, channel, boxes[i], stagings[i]);
    }
  }
}

// Adds up the threads' sums of squares of kCount boxes of a warpgroup and stores the output norms.
template <class Element, int kCount>
__device__ __forceinline__ void store_norms(const ConvParams& p, int channel, const Box* boxes,
                                            SquareSum<Element> (&squares)[kCount],
                                            BoxSquares<Element>& shared) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
#pragma unroll
    for (auto& sum : squares) sum += __shfl_xor_sync(~0u, sum, distance);
  }
  if (threadIdx.x % 32 == 0) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) shared.of_warps[i][threadIdx.x % 128 / 32] = squares[i];
  }
  cutlass::arch::NamedBarrier::sync(128, threadIdx.x / 128);
  // A warp each, since a norm takes its time.
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (threadIdx.x % 128 != i * 32) continue;
    const auto& sums = shared.of_warps[i];
    store_norm(p, channel, boxes[i], (sums[0] + sums[1]) + (sums[2] + sums[3]));
  }
}

// `staging`: Config::kStagings blocks. Two hold both boxes, so that these are stored together.
template <class Config>
requires(Config::kParts == 1) __device__ __forceinline__
    void store(const ConvParams& p, int channel, const Box* boxes, StagedBox<Config>& staging,
               BoxSquares<typename Config::Element>& shared, ChannelBias bias,
               float (&acc)[Config::kValues]) {
  using Element = typename Config::Element;
  auto* const stagings = reinterpret_cast<OperandBlock*>(&staging);
  uint32_t first[kBlock / 4], second[Config::kLastWidth / 4];
  const bool relu = activate_sums(p.activation, bias, acc);
  finish_pairs<Element, 0>(acc, bias, relu, first);
  finish_pairs<Element, kBlock / 2>(acc, bias, relu, second);
  if constexpr (Config::kStagings == 2) {
    store_boxes<Config>(p, channel, boxes, stagings, first, second);
  } else {
    store_boxes<Config>(p, channel, boxes, stagings, first);
    store_boxes<Config>(p, channel, boxes + 1, stagings, second);
  }
  if (Config::kByPixel || p.norm_output == nullptr) return;
  SquareSum<Element> squares[2] = {
      sum_of_squares<Element>(first, PixelCounts(p, channel, boxes[0])),
      sum_of_squares<Element>(second, PixelCounts(p, channel, boxes[1]))};
  store_norms<Element>(p, channel, boxes, squares, shared);
}

template <class Config>
__device__ __forceinline__ void store_one(const ConvParams& p, int channel, const Box& box,
                                          OperandBlock& staging,
                                          BoxSquares<typename Config::Element>& shared,
                                          ChannelBias bias, float (&sums)[kBlock / 2]) {
  using Element = typename Config::Element;
  uint32_t pairs[kBlock / 4];
  const bool relu = activate_sums(p.activation, bias, sums);
  finish_pairs<Element, 0>(sums, bias, relu, pairs);
  store_boxes<Config>(p, channel, &box, &staging, pairs);
  if (Config::kByPixel || p.norm_output == nullptr) return;
  SquareSum<Element> squares[1] = {sum_of_squares<Element>(pairs, PixelCounts(p, channel, box))};
  store_norms<Element>(p, channel, &box, squares, shared);
}

// ---- The residual ------------------------------------------------------------------------------

// The load warps bring the residual into the ring as a step of its own, so that it is on its way
// while the products run.

// Adds the entries of a box to the thread's sums of kColumns pixels x 64 channels, from value
// kFirst on. The box has a line of 64 channels for each pixel, in TMA's 128-byte swizzle; it is
// transposed on the way, as stage() does.
template <class Element, int kColumns, int kFirst, int kSize>
__device__ __forceinline__ void add_box(const OperandBlock& block, float (&acc)[kSize]) {
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
      to[0] += widen(__builtin_bit_cast(Element, static_cast<uint16_t>(pairs[i])));
      to[1] += widen(__builtin_bit_cast(Element, static_cast<uint16_t>(pairs[i] >> 16)));
    }
  }
}

// acc += those of a warpgroup's two boxes whose bits are set.
template <class Config>
__device__ __forceinline__ void add_residual(uint32_t bits, const OperandBlock* boxes,
                                             float (&acc)[Config::kValues]) {
  using Element = typename Config::Element;
  if (bits & 1) add_box<Element, kBlock, 0>(boxes[0], acc);
  if (bits & 2) add_box<Element, Config::kLastWidth, kBlock / 2>(boxes[1], acc);
}

// ---- float32 -----------------------------------------------------------------------------------

// A box of float32 is staged as two blocks of 32 channels, and each thread writes its values one by
// one.

// The number of the line, of two of 32 channels, that holds the channels of this warp's sums.
__device__ __forceinline__ int line_of_warp() { return threadIdx.x % 128 / 64; }

// The places of a thread's sums in its line of channels of each pixel, in TMA's 128-byte swizzle.
// No two lanes share a bank.
class ValuePlaces {
 public:
  __device__ __forceinline__ ValuePlaces() {
    const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int line = lane % 4 * 2 + i % 2, chunk = warp % 2 * 4 + i / 2 * 2 + lane / 16;
      offsets_[i] = line * kLineBytes + (chunk ^ line) * 16 + lane / 4 % 4 * 4;
    }
  }

  // In bytes, of sum `i`.
  __device__ __forceinline__ int operator[](int i) const {
    return offsets_[i % 4] + i / 4 * 8 * kLineBytes;
  }

 private:
  // Two neighbouring pixels of the thread's first channel, then of its second.
  int offsets_[4];
};

// Adds bias and ReLU to the values of kColumns pixels x 64 channels, from kFirst on, and stages
// them in `block`, which has the line of this warp.
template <int kColumns, int kFirst, int kSize>
__device__ __forceinline__ void stage(float (&acc)[kSize], const ChannelBias& bias, bool relu,
                                      OperandBlock& block) {
  const ValuePlaces places;
#pragma unroll
  for (int i = 0; i < kColumns / 2; ++i) {
    float& value = acc[kFirst + i];
    value += bias.values[i / 2 % 2];
    if (relu) value = rectified(value);
    *reinterpret_cast<float*>(block.bytes + places[i]) = value;
  }
}

// Adds the entries of a block that has the line of this warp to the thread's sums of kColumns
// pixels x 64 channels.
template <int kColumns, int kSize>
__device__ __forceinline__ void add_values(const OperandBlock& block, float (&acc)[kSize]) {
  const ValuePlaces places;
#pragma unroll
  for (int i = 0; i < kColumns / 2; ++i) {
    acc[i] += *reinterpret_cast<const float*>(block.bytes + places[i]);
  }
}

// A thread's part of the sum of squares of the staged values of kColumns pixels.
template <int kColumns, int kFirst, int kSize>
__device__ __forceinline__ double sum_of_squares(const float (&values)[kSize],
                                                 const PixelCounts& counts) {
  double sums[2] = {};  // short chains
#pragma unroll
  for (int i = 0; i < kColumns / 2; ++i) {
    add_square_below(sums[i % 2], static_cast<double>(values[kFirst + i]), i / 4 * 8 + i % 2,
                     counts.values[i / 2 % 2] - static_cast<int>(threadIdx.x % 4 * 2));
  }
  return sums[0] + sums[1];
}

// Stages and stores kColumns pixels of a warpgroup's box.
template <int kColumns, int kFirst, int kSize>
__device__ __forceinline__ void store_box(const ConvParams& p, int channel, const Box& box,
                                          OperandBlock (&staging)[2], const ChannelBias& bias,
                                          bool relu, float (&acc)[kSize]) {
  const bool leads = threadIdx.x % 128 == 0;
  const int warpgroup = threadIdx.x / 128;
  if (leads) cute::tma_store_wait<0>();  // until the previous store has read shared memory
  cutlass::arch::NamedBarrier::sync(128, warpgroup);
  stage<kColumns, kFirst>(acc, bias, relu, staging[line_of_warp()]);
  cute::tma_store_fence();
  cutlass::arch::NamedBarrier::sync(128, warpgroup);
  if (leads) {
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      cute::SM90_TMA_STORE_4D::copy(&p.map_output, &staging[part], channel + part * kBlock / 2,
                                    box.column, box.row, box.image);
    }
    cute::tma_store_arrive();
  }
}

// By pixel alone: without output norms.
template <class Config>
__device__ __forceinline__ void store_one(const ConvParams& p, int channel, const Box& box,
                                          OperandBlock (&staging)[2], BoxSquares<float>&,
                                          ChannelBias bias, float (&sums)[kBlock / 2]) {
  const bool relu = activate_sums(p.activation, bias, sums);
  store_box<kBlock, 0>(p, channel, box, staging, bias, relu, sums);
}

// On return `acc` holds the stored values.
template <class Config>
__device__ __forceinline__ void store(const ConvParams& p, int channel, const Box* boxes,
                                      OperandBlock (&staging)[2], BoxSquares<float>& shared,
                                      ChannelBias bias, float (&acc)[Config::kValues]) {
  constexpr int kSecond = kBlock / 2;  // values of the first box
  const bool relu = activate_sums(p.activation, bias, acc);
  store_box<kBlock, 0>(p, channel, boxes[0], staging, bias, relu, acc);
  store_box<Config::kLastWidth, kSecond>(p, channel, boxes[1], staging, bias, relu, acc);
  if (p.norm_output == nullptr) return;
  double squares[2] = {
      sum_of_squares<kBlock, 0>(acc, PixelCounts(p, channel, boxes[0])),
      sum_of_squares<Config::kLastWidth, kSecond>(acc, PixelCounts(p, channel, boxes[1]))};
  store_norms<float>(p, channel, boxes, squares, shared);
}

}  // namespace spamm::kernels::conv::sm90
