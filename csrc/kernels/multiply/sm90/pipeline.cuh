// The tiles and steps of the Hopper multiply, and its shared memory.
#pragma once

#include <cstdint>

#include "kernels/common/numeric.cuh"
#include "kernels/common/ring_sm90.cuh"
#include "kernels/common/roles_sm90.cuh"
#include "kernels/common/wgmma_sm90.cuh"

namespace spamm::kernels::multiply::sm90 {

using namespace kernels::sm90;

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
  static constexpr int kListWarps = 2, kLists = kListWarps, kListCapacity = 96;
  static constexpr int kMultiplyRegisters = 0;  // as launched
  static constexpr auto kNextKernel = NextKernel::kWhenSetUp;
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

// Stage by stage, what the warps that multiply must know beside the operands.
template <class Config>
struct Notice {
  enum class End : uint32_t { kNothing, kTile, kWork };

  Mask<Config> mask;
  End ends;

  __device__ static Notice of(const Mask<Config>& mask, bool ends_tile) {
    return {mask, ends_tile ? End::kTile : End::kNothing};
  }
  __device__ static Notice end_of_tile() { return {{}, End::kTile}; }
  __device__ static Notice end_of_work() { return {{}, End::kWork}; }

  __device__ bool ends_tile() const { return ends == End::kTile; }
  __device__ bool ends_work() const { return ends == End::kWork; }
};

template <class Config>
struct Step {
  int index;
  Mask<Config> mask;

  __device__ bool is_valid() const { return mask.any(); }
};

template <class Config>
struct Storage {
  using Ring = kernels::sm90::Ring<Tile, Step<Config>, Notice<Config>, Config::kStages,
                                   Config::kLists, Config::kListCapacity>;

  typename Config::Stage stages[Config::kStages];
  typename Config::Output output;
  Ring ring;  // a list for each list warp

  __device__ void initialize() {
    ring.initialize(2, Config::kReleases);
    cutlass::arch::fence_barrier_init();
  }
};

// The operand of a warpgroup that lies here in the first stage.
template <class Config, Major kMajor>
using Descriptor = StagedDescriptor<kMajor, typename Config::Stage, Config::kStages>;

}  // namespace spamm::kernels::multiply::sm90
