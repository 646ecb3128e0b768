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

template <class T>
__device__ __forceinline__ T* entry_of_c(const MultiplyParams<T>& p, int batch, int row,
                                         int column) {
  return static_cast<T*>(p.c) + batch * p.c_batch_stride + row * p.c_leading + column;
}

// alpha * sum + beta * input, for an entry of C. Without kAdds there is no input.
template <bool kAdds = true, class T>
__device__ __forceinline__ T finished(const MultiplyParams<T>& p, int batch, int row, int column,
                                      T sum) {
  T value = p.alpha * sum;
  if (kAdds && p.input != nullptr) {
    const auto* input = static_cast<const T*>(p.input) + batch * p.input_strides[0];
    value += p.beta * input[row * p.input_strides[1] + column * p.input_strides[2]];
  }
  return value;
}

// Writes the entry for x to `column` of a row of C, and that for y to the next one. A matrix
// instruction gives each lane such pairs. For 4-byte and 8-byte entries those of four lanes fill
// whole memory sectors, so staging C in shared memory would gain nothing. Both columns exist, and
// their address is aligned.
template <bool kAdds, class T>
__device__ __forceinline__ void store_pair(const MultiplyParams<T>& p, int batch, int row,
                                           int column, T x, T y) {
  *reinterpret_cast<EntryPair<T>*>(entry_of_c(p, batch, row, column)) = {
      finished<kAdds>(p, batch, row, column, x), finished<kAdds>(p, batch, row, column + 1, y)};
}

// A unit of a row. If C's rows begin with such units, pairs of whole tiles take less time than
// StoreRoom.
constexpr int kStoreUnit = 4;

// A warp's room in shared memory for a part of its sums. From there they go to C wherever its rows
// begin, and what lies outside is left out: lanes write neighbours, because parts of memory sectors
// cost several times the time of whole ones.
template <class T>
struct StoreRoom {
  static constexpr int kRows = sizeof(T) == 4 ? 8 : 16, kColumns = sizeof(T) == 4 ? 32 : 16;
  // Rows begin in different banks. Those of float32 are written in pairs.
  alignas(8) T entries[kRows][kColumns + (sizeof(T) == 4 ? 8 : 1)];

  // All lanes call it once the entries are set.
  __device__ __forceinline__ void store(const MultiplyParams<T>& p, int batch, int first_row,
                                        int first_column) const {
    constexpr int kTogether = 32 / kColumns;  // rows
    if (first_column >= p.n) return;
    __syncwarp();
    int lane = threadIdx.x % 32;
    asm volatile("" : "+r"(lane));  // else addresses are found before the sums are out of the way
    const int column = first_column + lane % kColumns;
    // Few rows at a time, because registers are scarce.
#pragma unroll 4
    for (int i = lane / kColumns; i < kRows; i += kTogether) {
      const int row = first_row + i;
      if (row < p.m && column < p.n) {
        *entry_of_c(p, batch, row, column) =
            finished(p, batch, row, column, entries[i][lane % kColumns]);
      }
    }
    __syncwarp();
  }
};

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
  static constexpr bool kListed = false;         // whether lists stand for norm maps (listed.cuh)
  static constexpr bool kSkipsEdges = false;     // whether granules outside C are skipped
  static constexpr bool kSegmented = kOwn == 1;  // whether thread blocks may share a tile's steps
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
