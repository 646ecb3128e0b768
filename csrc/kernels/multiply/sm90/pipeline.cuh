// Tiles, steps, masks and shared memory of the Hopper multiply.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/common/numeric.cuh"
#include "kernels/common/ring_sm90.cuh"
#include "kernels/common/roles_sm90.cuh"
#include "kernels/common/wgmma_sm90.cuh"
#include "kernels/multiply/params.h"

namespace spamm::kernels {

template <class T>
struct alignas(2 * sizeof(T)) EntryPair {
  T x, y;
};

// Writes alpha * x + beta * input to `column` of a row of C, and the same with y to the next one. A
// matrix instruction gives each lane such pairs. For 4-byte and 8-byte entries those of four lanes
// fill whole memory sectors, so staging C in shared memory would gain nothing. kPairs: both columns
// exist, their address is aligned, and there is no input.
template <bool kPairs, class T>
__device__ __forceinline__ void store_pair(const MultiplyParams<T>& p, int batch, int64_t row,
                                           int64_t column, T x, T y) {
  T* const to = static_cast<T*>(p.c) + batch * p.c_batch_stride + row * p.c_leading + column;
  if constexpr (kPairs) {
    *reinterpret_cast<EntryPair<T>*>(to) = {p.alpha * x, p.alpha * y};
  } else {
    if (row >= p.m) return;
    const T values[2] = {x, y};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (column + i >= p.n) return;
      T value = p.alpha * values[i];
      if (p.input != nullptr) {
        value += p.beta * static_cast<const T*>(
                              p.input)[batch * p.input_strides[0] + row * p.input_strides[1] +
                                       (column + i) * p.input_strides[2]];
      }
      to[i] = value;
    }
  }
}

}  // namespace spamm::kernels

namespace spamm::kernels::multiply::sm90 {

using namespace kernels::sm90;

// A tile has kRows x kColumns blocks of C. Each warpgroup computes kOwn neighbouring blocks of a
// row. Masks decide about cubes with edges of kGranule: 32 if some block edge is 32, else 64.
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
      kGranules * kGranules * kGranules;  // bits of a mask for each block of C
  static constexpr int kMaskBits = kRows * kColumns * kBlockBits;
  static constexpr int kListWarps = 2, kLists = kListWarps, kListCapacity = 96;
  static constexpr int kMultiplyRegisters = 0, kOtherRegisters = 0;  // as launched
  static constexpr bool kNamesTiles = false;
  static constexpr bool kListed = false;      // whether lists stand for norm maps (listed.cuh)
  static constexpr bool kSkipsEdges = false;  // whether granules outside C are skipped
  static constexpr bool kSegmented = false;   // whether thread blocks may share a tile's steps
  static constexpr auto kNextKernel = NextKernel::kWhenSetUp;
  static constexpr int kReleases = 4 * kWarpgroups;  // of a stage: one by each multiplying warp

  struct Stage {
    OperandBlock a[kRows], b[kColumns];
  };
  static constexpr int kBytesPerBlock = sizeof(OperandBlock);  // of one fetch()
  static constexpr int kStageDepth = kBlock;
  struct Output {
    OperandBlock blocks[kWarpgroups];  // the staging block of each warpgroup
  };

  // A tile with few sums needs few registers. So a thread block of the previous or the next kernel
  // fits beside it.
  static constexpr int kBlocksPerSm = kOwn == 1 ? 2 : 1;
};

// The place of a tile. Row and column count 64 x 64 blocks of C. With kSegmented, `batch` also
// holds the segment (list.cuh), because multiplying threads have no register to spare.
struct Tile {
  int batch, row, column;
};

// The valid granules of a step (64 of K). Each block of C has kBlockBits consecutive bits, and the
// blocks are in row-major order. Within a block k is the slowest index, then column, then row.
template <class Config>
struct Mask {
  uint32_t words[(Config::kMaskBits + 31) / 32];

  // `count` divides both 32 and `first`.
  __device__ uint32_t bits(int first, int count) const {
    return words[first / 32] >> first % 32 & ~0u >> (32 - count);
  }

  // The mask of a stage of one granule's depth, at `depth` of the step. Has the layout of a mask.
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

  // A bit beside those of the granules, for a mask that has any and leaves room.
  __device__ void mark(bool value) {
    static_assert(Config::kMaskBits < 32);
    words[0] |= static_cast<uint32_t>(value && any()) << 31;
  }
  __device__ bool is_marked() const { return words[0] >> 31 != 0; }

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

// The facts of a stage that a multiplying warp needs besides the operands.
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

// With lists: a step and a tile of a block-sparse product, in cells (multiply/params.h). Where the
// mask has no bit, a number may be anything. Those of C are -1 where nothing is stored.
template <class Config>
struct CellStep {
  int a[Config::kRows], b[Config::kColumns];
  Mask<Config> mask;
};
template <class Config>
struct CellTile {
  int cells[Config::kRows * Config::kColumns];
};

template <class Config>
using StepOf = std::conditional_t<Config::kListed, CellStep<Config>, Step<Config>>;
template <class Config>
using TileOf = std::conditional_t<Config::kListed, CellTile<Config>, Tile>;

template <class Config>
struct Storage {
  using Ring = kernels::sm90::Ring<TileOf<Config>, StepOf<Config>, Notice<Config>, Config::kStages,
                                   Config::kLists, Config::kListCapacity, Config::kNamesTiles>;

  typename Config::Stage stages[Config::kStages];
  typename Config::Output output;
  Ring ring;  // with one list for each list warp

  __device__ void initialize() {
    ring.initialize(2, Config::kReleases);
    cutlass::arch::fence_barrier_init();
  }
};

// Follows a warpgroup's operand from stage to stage.
template <class Config, Major kMajor>
using Descriptor = StagedDescriptor<kMajor, typename Config::Stage, Config::kStages>;

}  // namespace spamm::kernels::multiply::sm90
