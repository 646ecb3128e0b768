// The shared memory of the Hopper multiply: what its warps hand to each other, and through which
// barriers.
#pragma once

#include <cstdint>

#include "cutlass/arch/barrier.h"
#include "kernels/common/numeric.cuh"
#include "kernels/common/wgmma_sm90.cuh"

namespace spamm::kernels::sm90 {

// A tile of kRows x kColumns blocks of C; each warpgroup makes kOwn neighbours of a row. Products
// are skipped by cubes with edges of kGranule: 64, or 32 where one of SpAMM's block edges is 32.
template <class Element_, Major kMajorA_, Major kMajorB_, int kGranule_, int kRows_, int kColumns_,
          int kOwn_, int kStages_>
struct Config {
  using Element = Element_;
  using Norm = NormOf<Element>;
  static constexpr Major kMajorA = kMajorA_, kMajorB = kMajorB_;
  static constexpr int kRows = kRows_, kColumns = kColumns_, kOwn = kOwn_, kStages = kStages_;
  static constexpr int kWarpgroups = kRows * kColumns / kOwn;
  static constexpr int kThreads = 128 * (1 + kWarpgroups);
  static constexpr int kGranule = kGranule_;
  static constexpr int kGranules = kBlock / kGranule;  // along each edge of an operand block
  static constexpr int kBlockBits =
      kGranules * kGranules * kGranules;  // of a mask, for each block of C
  static constexpr int kMaskBits = kRows * kColumns * kBlockBits;
  static constexpr int kLists = 2, kListCapacity = 96;
  static constexpr int kReleases = 4 * kWarpgroups;  // of a stage: one by each warp that multiplies

  struct Stage {
    OperandBlock a[kRows], b[kColumns];
  };
  static constexpr int kBytesPerBlock = sizeof(OperandBlock);  // that one fetch brings
  static constexpr int kStageDepth = kBlock;
  struct Output {
    OperandBlock blocks[kWarpgroups];  // where each warpgroup puts C together
  };

  // Tiles with few sums leave room on the multiprocessor for the kernel before or after.
  static constexpr int kBlocksPerSm = kOwn == 1 ? 2 : 1;
};

// In blocks of C, of one batch.
struct Tile {
  int batch, row, column;
};

// Which granules of a step of K, 64 deep, are valid. The kBlockBits of a block of C lie together,
// the blocks in row-major order; within a block the order is k, column, row, with k slowest.
template <class Config>
struct Mask {
  uint32_t words[(Config::kMaskBits + 31) / 32];

  // `count` divides both 32 and `first`.
  __device__ uint32_t bits(int first, int count) const {
    return words[first / 32] >> first % 32 & ~0u >> (32 - count);
  }

  // Of `depth` of the step alone, as if it were the whole step.
  __device__ Mask at_depth(int depth) const {
    if constexpr (Config::kGranules == 1) return *this;
    constexpr uint32_t kLayer = Config::kGranules * Config::kGranules;
    constexpr uint32_t kFirst = ((1u << kLayer) - 1) * 0x01010101u;
    Mask layer;
#pragma unroll
    for (int i = 0; i < sizeof(words) / sizeof(words[0]); ++i)
      layer.words[i] = words[i] >> depth / Config::kGranule * kLayer & kFirst;
    return layer;
  }

  __device__ void set(int index, bool value) {
    words[index / 32] |= static_cast<uint32_t>(value) << index % 32;
  }

  __device__ bool any() const {
    uint32_t any = 0;
    for (const uint32_t word : words) any |= word;
    return any != 0;
  }

  __device__ Mask operator&(const Mask& other) const {
    Mask both;
#pragma unroll
    for (int i = 0; i < sizeof(words) / sizeof(words[0]); ++i)
      both.words[i] = words[i] & other.words[i];
    return both;
  }
};

template <class Config>
struct Step {
  int index;
  Mask<Config> mask;
};

using Barrier = cutlass::arch::ClusterTransactionBarrier;

// What the warpgroups must know of a stage beside its operands.
enum class End : uint32_t { kNothing, kTile, kWork };

template <class Config>
struct Notice {
  Mask<Config> mask;
  End ends;
};

template <class Config>
struct Storage {
  // The valid steps of a tile, or of a part of it: one list warp's.
  struct List {
    Tile tile;
    int count;
    bool ends_tile, ends_work;
    Step<Config> steps[Config::kListCapacity];
  };

  typename Config::Stage stages[Config::kStages];
  typename Config::Output output;
  List lists[Config::kLists];
  Notice<Config> notices[Config::kStages];
  Tile tiles[Config::kStages];  // where one ends
  alignas(8) Barrier full[Config::kStages], empty[Config::kStages];
  Barrier list_full[Config::kLists], list_empty[Config::kLists];

  __device__ void initialize() {
    for (int i = 0; i < Config::kStages; ++i) {
      full[i].init(2);  // both loads
      empty[i].init(Config::kReleases);
    }
    for (int i = 0; i < Config::kLists; ++i) {
      list_full[i].init(32);  // all lanes of the warp that writes it
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
