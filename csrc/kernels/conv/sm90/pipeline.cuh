// The shared memory of the Hopper convolution: what its warps hand to each other, and through which
// barriers.
#pragma once

#include <type_traits>

#include "kernels/common/tf32.h"
#include "kernels/conv/sm90/params.h"
#include "kernels/multiply/sm90/pipeline.cuh"

namespace spamm::kernels::conv {

using sm90::Barrier;
using sm90::kBlock;
using sm90::kLineBytes;
using sm90::OperandBlock;
using sm90::RingPosition;

// A tile of kRows x 64 output channels and kBoxes x 64 pixels. Each warpgroup makes 64 channels of
// two neighbouring boxes, the second of which fills only its first kLastWidth columns. A stage is
// kDepth channels deep: float32, which is multiplied as TF32, takes two for a block of 64.
template <class Element_, int kRows_, int kBoxes_, int kLastWidth_, int kStages_>
struct Config {
  using Element = Element_;
  using Operand = std::conditional_t<std::is_same_v<Element, float>, Tf32, Element>;
  static constexpr int kDepth = kLineBytes / sizeof(Element), kParts = kBlock / kDepth;
  static constexpr int kRows = kRows_, kBoxes = kBoxes_, kLastWidth = kLastWidth_;
  static constexpr int kStages = kStages_;
  static constexpr int kWarpgroups = kRows * kBoxes / 2;
  static constexpr int kThreads = 128 * (1 + kWarpgroups);
  static constexpr int kLists = 2, kListCapacity = 128;
  static constexpr int kValues = (kBlock + kLastWidth) / 2;  // sums of a thread

  // Whether box `i` of a tile is only kLastWidth pixels wide.
  __host__ __device__ static constexpr bool is_narrow(int i) {
    return kLastWidth < kBlock && i % 2 == 1;
  }
};

// First pixel of a box, in the output.
struct Box {
  int image, row, column;
};

template <class Config>
struct Tile {
  int channel;  // the first
  Box boxes[Config::kBoxes];

  __device__ const Box& box(int i) const { return boxes[i]; }
};

// A kernel position and 64 channels there, and the blocks of the output for which their product is
// valid: bit row * kBoxes + box.
struct Step {
  uint16_t mask, group;
  uint8_t kernel_row, kernel_column;
  uint16_t position;
};

// Squares of numbers other than halves need more range than float has.
template <class Element>
using SquareSum = std::conditional_t<std::is_same_v<Element, __half>, float, double>;

// Sums of squares of a warpgroup's two boxes, warp by warp.
template <class Element>
struct BoxSquares {
  SquareSum<Element> of_warps[2][4];
};

// Above a step's mask.
constexpr uint32_t kEndsTile = 1u << 30, kEndsWork = 1u << 31;

// 64 pixels x 64 channels on their way out: one block for each kDepth channels.
template <class Config>
using StagedBox = std::conditional_t<Config::kParts == 1, OperandBlock, OperandBlock[2]>;

// What the loads, the products and the stores read and write.
template <class Config>
struct Blocks {
  struct Stage {
    OperandBlock weight[Config::kRows], pixels[Config::kBoxes];
  };
  Stage stages[Config::kStages];
  StagedBox<Config> output[Config::kWarpgroups];
};

template <class Config>
struct Storage : Blocks<Config> {
  // The valid steps of a tile, or of a part of it.
  struct List {
    Tile<Config> tile;
    int count;
    bool ends_tile, ends_work;
    Step steps[Config::kListCapacity];
  };

  BoxSquares<typename Config::Element> squares[Config::kWarpgroups];
  List lists[Config::kLists];
  // What the warpgroups must know of a stage beside its operands: a step's mask and the flags
  // above, and the tile where it ends.
  uint32_t notices[Config::kStages];
  Tile<Config> tiles[Config::kStages];
  alignas(8) Barrier full[Config::kStages], empty[Config::kStages];
  Barrier list_full[Config::kLists], list_empty[Config::kLists];

  __device__ void initialize() {
    for (int i = 0; i < Config::kStages; ++i) {
      full[i].init(2);                         // both loads
      empty[i].init(4 * Config::kWarpgroups);  // every warp that multiplies
    }
    for (int i = 0; i < Config::kLists; ++i) {
      list_full[i].init(32);  // the lanes that wrote it
      list_empty[i].init(2);  // both loads
    }
    cutlass::arch::fence_barrier_init();
  }
};

}  // namespace spamm::kernels::conv
