// The shared memory of the Hopper multiply: what its warps hand to each other, and through which
// barriers.
#pragma once

#include <cstdint>

#include "cutlass/arch/barrier.h"
#include "wgmma_sm90.cuh"

namespace spamm::kernels::sm90 {

// A tile of kRows x kColumns blocks of C; each warpgroup makes kOwn neighbours of a row.
template <class Element_, Major kMajorA_, Major kMajorB_, int kRows_, int kColumns_, int kOwn_,
          int kStages_>
struct Config {
  using Element = Element_;
  static constexpr Major kMajorA = kMajorA_, kMajorB = kMajorB_;
  static constexpr int kRows = kRows_, kColumns = kColumns_, kOwn = kOwn_, kStages = kStages_;
  static constexpr int kWarpgroups = kRows * kColumns / kOwn;
  static constexpr int kThreads = 128 * (1 + kWarpgroups);
  static constexpr int kLists = 2, kListCapacity = 128;
  // Tiles with few sums leave room on the multiprocessor for the kernel before or after.
  static constexpr int kBlocksPerSm = kOwn == 1 ? 2 : 1;
};

// In blocks of C, of one batch.
struct Tile {
  int batch, row, column;
};

// A step of K, 64 deep, and the blocks of C for which it is valid: bit row * kColumns + column.
struct Step {
  int index;
  uint32_t mask;
};

using Barrier = cutlass::arch::ClusterTransactionBarrier;

// Above a step's mask.
constexpr uint32_t kEndsTile = 1u << 30, kEndsWork = 1u << 31;

template <class Config>
struct Storage {
  struct Stage {
    OperandBlock a[Config::kRows], b[Config::kColumns];
  };
  // The valid steps of a tile, or of a part of it.
  struct List {
    Tile tile;
    int count;
    bool ends_tile, ends_work;
    Step steps[Config::kListCapacity];
  };

  Stage stages[Config::kStages];
  OperandBlock output[Config::kWarpgroups];  // where C is put together
  List lists[Config::kLists];
  // What the warpgroups must know of a stage beside its operands: a step's mask and the flags
  // below, and the tile where it ends.
  uint32_t notices[Config::kStages];
  Tile tiles[Config::kStages];
  alignas(8) Barrier full[Config::kStages], empty[Config::kStages];
  Barrier list_full[Config::kLists], list_empty[Config::kLists];

  __device__ void initialize() {
    for (int i = 0; i < Config::kStages; ++i) {
      full[i].init(2);                         // both loads
      empty[i].init(4 * Config::kWarpgroups);  // every warp that multiplies
    }
    for (int i = 0; i < Config::kLists; ++i) {
      list_full[i].init(1);
      list_empty[i].init(2);  // both loads
    }
    cutlass::arch::fence_barrier_init();
  }
};

// A position in a ring of kSlots slots, each with a barrier.
template <int kSlots>
struct RingPosition {
  int slot = 0;
  uint32_t phase = 0;

  __device__ void advance() {
    if (++slot == kSlots) {
      slot = 0;
      phase ^= 1;
    }
  }
};

}  // namespace spamm::kernels::sm90
