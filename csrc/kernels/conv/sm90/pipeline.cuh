// Tiles, steps, notices and shared memory of the Hopper convolution. Kernels that do more have a
// Config of their own, and parameters that extend ConvParams.
#pragma once

#include <type_traits>

#include "kernels/common/numeric.cuh"
#include "kernels/common/ring_sm90.cuh"
#include "kernels/common/roles_sm90.cuh"
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
// step. kByPixel: the pixels of a box are judged one by one. kSegmented: a tile's steps are cut
// into segments (segments.cuh).
template <class Element_, int kRows_, int kBoxes_, int kLastWidth_, int kStages_,
          int kStagings_ = 1, bool kByPixel_ = false, bool kSegmented_ = false>
struct Config {
  using Element = Element_;
  using Operand = std::conditional_t<std::is_same_v<Element, float>, Tf32, Element>;
  using Params = ConvParams;
  static constexpr int kDepth = kLineBytes / sizeof(Element), kParts = kBlock / kDepth;
  static constexpr int kRows = kRows_, kBoxes = kBoxes_, kLastWidth = kLastWidth_;
  static constexpr int kStages = kStages_;
  static constexpr int kStagings = kStagings_;  // boxes that a warpgroup stores at a time
  static constexpr int kWarpgroups = kRows * kBoxes / 2;
  static constexpr int kThreads = 128 * (1 + kWarpgroups);
  static constexpr int kThreadBlocks = kWarpgroups == 1 ? 2 : 1;  // of a multiprocessor
  static constexpr int kListWarps = 1, kLists = 2;
  // By pixel, a list is handed over as soon as there are up to 32 steps.
  static constexpr int kListCapacity = kByPixel_ ? 32 : 128;
  static constexpr int kMultiplyRegisters = 0;  // as launched
  static constexpr auto kNextKernel = kernels::sm90::NextKernel::kAtOnce;
  static constexpr bool kAddsResidual = kParts == 1;
  static constexpr bool kByPixel = kByPixel_, kSegmented = kSegmented_;
  static constexpr int kValues = (kBlock + kLastWidth) / 2;  // sums in each thread

  // Tells whether box `i` of a tile has only kLastWidth pixels.
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
};

// One kernel position and channel group. `mask` has bit row * kBoxes + box for each output block
// for which the step is valid. One more step for each row of a tile brings the residual; its group
// is the row.
struct alignas(8) Step {                         // one word of shared memory
  static constexpr uint16_t kResidual = 0xffff;  // in place of a kernel position

  uint16_t mask, group;
  uint8_t kernel_row, kernel_column;
  uint16_t kernel_position;

  __device__ bool is_valid() const { return mask != 0; }
  __device__ bool is_residual() const { return kernel_position == kResidual; }
};

// A step of boxes whose pixels are judged one by one. Bit i of `pixels` tells whether the step is
// valid for pixel i of a box. It counts only where `is_mixed`: some existing pixels of a box are
// valid and others are not.
template <int kBoxes>
struct StepByPixel : Step {
  bool is_mixed;
  uint64_t pixels[kBoxes];
};

// The facts of a stage that a multiplying warp needs besides the operands: the step's mask,
// and whether the tile or all work ends. A stage that brings the residual has its step's mask
// further left, so that a stage with products to compute needs no further test.
struct Notice {
  static constexpr int kBroughtShift = 12;
  static constexpr uint32_t kIsMixed = 1u << 29;
  static constexpr uint32_t kEndsTile = 1u << 30, kEndsWork = 1u << 31;

  uint32_t bits;

  __device__ static Notice of(uint32_t mask, bool ends_tile) {
    return {mask | (ends_tile ? kEndsTile : 0)};
  }
  __device__ static Notice of_residual(uint32_t mask, bool ends_tile) {
    return of(mask << kBroughtShift, ends_tile);
  }
  __device__ static Notice end_of_tile() { return {kEndsTile}; }
  __device__ static Notice end_of_work() { return {kEndsWork}; }

  __device__ bool ends_tile() const { return bits & kEndsTile; }
  __device__ bool ends_work() const { return bits & kEndsWork; }
  __device__ bool is_mixed() const { return bits & kIsMixed; }
  // The bits of a warpgroup's two boxes.
  __device__ uint32_t mask(int warpgroup) const { return bits >> (warpgroup * 2) & 3; }
  // The same of what a stage brings in place of operands.
  __device__ uint32_t brought_mask(int warpgroup) const {
    return bits >> (kBroughtShift + warpgroup * 2) & 3;
  }
};

// The notice of a StepByPixel. `pixels` counts only if the step is mixed.
template <int kBoxes>
struct NoticeByPixel : Notice {
  uint64_t pixels[kBoxes];

  __device__ NoticeByPixel(const Notice& notice) : Notice(notice) {}
};

// Only the squares of float16 are sure to fit float's range.
template <class Element>
using SquareSum = std::conditional_t<std::is_same_v<Element, __half>, float, double>;

// The sums of squares of a warpgroup's two boxes, one for each warp.
template <class Element>
struct BoxSquares {
  SquareSum<Element> of_warps[2][4];
};

// A warpgroup's staging blocks of the output: of kStagings boxes, one for each kDepth channels.
template <class Config>
using StagedBox =
    std::conditional_t<Config::kParts * Config::kStagings == 1, OperandBlock, OperandBlock[2]>;

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
using StepOf = std::conditional_t<Config::kByPixel, StepByPixel<Config::kBoxes>, Step>;
template <class Config>
using NoticeOf = std::conditional_t<Config::kByPixel, NoticeByPixel<Config::kBoxes>, Notice>;

template <class Config>
using RingOf = kernels::sm90::Ring<Tile<Config>, StepOf<Config>, NoticeOf<Config>, Config::kStages,
                                   Config::kLists, Config::kListCapacity>;

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
