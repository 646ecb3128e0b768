// Tiles, steps, notices and shared memory of the Hopper convolution.
#pragma once

#include <type_traits>

#include "kernels/common/ring_sm90.cuh"
#include "kernels/common/roles_sm90.cuh"
#include "kernels/common/tf32.h"
#include "kernels/common/wgmma_sm90.cuh"
#include "kernels/conv/sm90/params.h"

namespace spamm::kernels::conv::sm90 {

using kernels::sm90::Barrier;
using kernels::sm90::kBlock;
using kernels::sm90::kLineBytes;
using kernels::sm90::OperandBlock;
using kernels::sm90::RingPosition;

// A tile has kRows x 64 output channels and kBoxes boxes. Each warpgroup computes 64 channels of
// two neighbouring boxes. In a batch of 65 to 127 images the second box is only kLastWidth columns
// wide, a multiple of 8. A stage has kDepth channels: float32, multiplied as TF32, needs two for a
// step.
template <class Element_, int kRows_, int kBoxes_, int kLastWidth_, int kStages_>
struct Config {
  using Element = Element_;
  using Operand = std::conditional_t<std::is_same_v<Element, float>, Tf32, Element>;
  static constexpr int kDepth = kLineBytes / sizeof(Element), kParts = kBlock / kDepth;
  static constexpr int kRows = kRows_, kBoxes = kBoxes_, kLastWidth = kLastWidth_;
  static constexpr int kStages = kStages_;
  static constexpr int kWarpgroups = kRows * kBoxes / 2;
  static constexpr int kThreads = 128 * (1 + kWarpgroups);
  static constexpr int kListWarps = 1, kLists = 2, kListCapacity = 128;
  static constexpr int kMultiplyRegisters = 0;  // as launched
  static constexpr auto kNextKernel = kernels::sm90::NextKernel::kAtOnce;
  static constexpr int kValues = (kBlock + kLastWidth) / 2;  // sums in each thread

  // Whether box `i` of a tile has only kLastWidth pixels.
  __host__ __device__ static constexpr bool is_narrow(int i) {
    return kLastWidth < kBlock && i % 2 == 1;
  }
};

// The first pixel of a box, in the output.
struct Box {
  int image, row, column;
};

template <class Config>
struct Tile {
  int channel;  // the first
  Box boxes[Config::kBoxes];

  __device__ const Box& box(int i) const { return boxes[i]; }
};

// One kernel position and channel group. `mask` has bit row * kBoxes + box for each output block
// for which the step is valid.
struct Step {
  uint16_t mask, group;
  uint8_t kernel_row, kernel_column;
  uint16_t kernel_position;

  __device__ bool is_valid() const { return mask != 0; }
};

// What a multiplying warp needs to know about a stage besides the operands: the step's mask,
// whether the tile or all work ends, and, with resident weights, the number of the weight block.
struct Notice {
  static constexpr int kWeightShift = 8;
  static constexpr uint32_t kEndsTile = 1u << 30, kEndsWork = 1u << 31;

  uint32_t bits;

  __device__ static Notice of(uint32_t mask, bool ends_tile, uint32_t weight = 0) {
    return {mask | weight << kWeightShift | (ends_tile ? kEndsTile : 0)};
  }
  __device__ static Notice end_of_tile() { return {kEndsTile}; }
  __device__ static Notice end_of_work() { return {kEndsWork}; }

  __device__ bool ends_tile() const { return bits & kEndsTile; }
  __device__ bool ends_work() const { return bits & kEndsWork; }
  // The bits of a warpgroup's two boxes.
  __device__ uint32_t mask(int warpgroup) const { return bits >> (warpgroup * 2) & 3; }
  __device__ uint32_t weight() const { return bits >> kWeightShift & 0xff; }
};

// Only the squares of float16 are sure to fit float's range.
template <class Element>
using SquareSum = std::conditional_t<std::is_same_v<Element, __half>, float, double>;

// The sums of squares of a warpgroup's two boxes, one for each warp.
template <class Element>
struct BoxSquares {
  SquareSum<Element> of_warps[2][4];
};

// The staging blocks of a box of the output, one for each kDepth channels.
template <class Config>
using StagedBox = std::conditional_t<Config::kParts == 1, OperandBlock, OperandBlock[2]>;

// The stages and the staging blocks.
template <class Config>
struct Blocks {
  struct Stage {
    OperandBlock weight[Config::kRows], pixels[Config::kBoxes];
  };
  Stage stages[Config::kStages];
  StagedBox<Config> output[Config::kWarpgroups];
};

template <class Config>
using RingOf = kernels::sm90::Ring<Tile<Config>, Step, Notice, Config::kStages, Config::kLists,
                                   Config::kListCapacity>;

template <class Config>
struct Storage : Blocks<Config> {
  using Ring = RingOf<Config>;

  BoxSquares<typename Config::Element> squares[Config::kWarpgroups];
  Ring ring;

  __device__ void initialize() {
    ring.initialize(2, 4 * Config::kWarpgroups);
    cutlass::arch::fence_barrier_init();
  }
};

}  // namespace spamm::kernels::conv::sm90
