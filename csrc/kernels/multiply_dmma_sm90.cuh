// C = alpha * (A B over valid blocks) + beta * input in float64 on Hopper (sm_90a), by mma.sync.
//
// Lists, loads and barriers are multiply_sm90.cuh's, but a stage is 8 deep, one instruction's
// depth, a warpgroup makes one block of C, and each of its warps goes through the stages by itself,
// with 32 x 32 of C in registers. Four such warps on each quarter of a multiprocessor hide each
// other's waits; a block that is valid alone has all four tensor cores.
//
// An instruction adds over eight k, in any order as long as A and B agree: lane t of four takes
// k = 2t and 2t + 1, which are neighbours where K is contiguous, and in any layout come without
// bank conflicts. Skipping is uniform in a warp and exact for each block product; sums run in the
// order of the steps of K. Limits: as multiply_sm90.cuh.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "list_sm90.cuh"
#include "load_sm90.cuh"
#include "multiply_sm90.cuh"
#include "ptx_sm80.cuh"
#include "store_pair.cuh"

namespace spamm::kernels::sm90 {

struct DoubleProduct : TiledProduct<double> {
  CUtensorMap map_a, map_b;
};

constexpr int kDoubleDepth = 8;  // of a stage

// 64 rows of A, or columns of B, 8 deep. K-major: lines of 8 k, swizzled in 64 bytes. Else four
// pieces of 16 rows, in lines of one k, swizzled in 128 bytes.
struct alignas(1024) DoubleBlock {
  static constexpr int kPieceRows = 16;
  uint8_t bytes[kBlock * kDoubleDepth * sizeof(double)];
};

// A warpgroup makes a block of C, each warp 32 x 32 of it.
template <Major kMajorA_, Major kMajorB_, int kGranule_, int kRows_, int kColumns_, int kStages_,
          int kBlocksPerSm_>
struct DoubleConfig
    : Config<double, kMajorA_, kMajorB_, kGranule_, kRows_, kColumns_, 1, kStages_> {
  struct Stage {
    DoubleBlock a[kRows_], b[kColumns_];
  };
  static constexpr int kBytesPerBlock = sizeof(DoubleBlock);
  static constexpr int kStageDepth = kDoubleDepth;
  struct Output {};
  static constexpr int kBlocksPerSm = kBlocksPerSm_;
  // 640 threads start with 96 registers each; those that multiply need some of the others'.
  static constexpr bool kMovesRegisters = kRows_ * kColumns_ == 4;
};

// What the loader calls for block `i` of its side of a tile and depths 8 * `stage` on.
template <class Config, bool kIsA>
__device__ __forceinline__ void fetch(const DoubleProduct& params, int batch, int block, int stage,
                                      int i, Barrier& barrier, typename Config::Stage& to) {
  constexpr auto kHint = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);
  const CUtensorMap& map = kIsA ? params.map_a : params.map_b;
  auto* const full = reinterpret_cast<uint64_t*>(&barrier);
  uint8_t* const bytes = (kIsA ? to.a : to.b)[i].bytes;
  const int line = block * kBlock, k = stage * kDoubleDepth;
  if constexpr ((kIsA ? Config::kMajorA : Config::kMajorB) == Major::K) {
    cute::SM90_TMA_LOAD_3D::copy(&map, full, kHint, bytes, k, line, batch);
  } else {
    constexpr int kPieceRows = DoubleBlock::kPieceRows, kPieces = kBlock / kPieceRows;
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      cute::SM90_TMA_LOAD_3D::copy(&map, full, kHint,
                                   bytes + piece * (sizeof(DoubleBlock) / kPieces),
                                   line + piece * kPieceRows, k, batch);
    }
  }
}

// A lane's view of one operand: of rows of A, or columns of B, from a multiple of 32 on.
template <Major kMajor>
class LaneView {
 public:
  __device__ explicit LaneView(int first_row) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    if constexpr (kMajor == Major::K) {
      offset_ = (first_row + g) * 64 + (t ^ (g / 2 & 3)) * 16;
    } else {
      offset_ = first_row / DoubleBlock::kPieceRows * 1024 + 2 * t * kLineBytes +
                (g / 2 ^ 2 * t) * 16 + g % 2 * 8;
    }
  }

  // Entries k = 2t and 2t + 1 of row 8 * kEighth + g of the operand at this shared address.
  template <int kEighth>
  __device__ __forceinline__ void load(uint32_t operand, double& even, double& odd) const {
    if constexpr (kMajor == Major::K) {
      asm volatile("ld.shared.v2.f64 {%0, %1}, [%2];"
                   : "=d"(even), "=d"(odd)
                   : "r"(operand + offset_ + kEighth * 8 * 64));
    } else {
      constexpr int kPiece = kEighth / 2 * 1024, kHigh = kEighth % 2 * 4 * 16;
      asm volatile("ld.shared.f64 %0, [%1];"
                   : "=d"(even)
                   : "r"(operand + kPiece + (offset_ ^ kHigh)));
      asm volatile("ld.shared.f64 %0, [%1];"
                   : "=d"(odd)
                   : "r"(operand + kPiece + kLineBytes + (offset_ ^ (kHigh | 16))));
    }
  }

 private:
  uint32_t offset_;
};

// A warp's 32 x 32 of C.
template <class Config>
class WarpSums {
  using Stage = typename Config::Stage;

 public:
  __device__ explicit WarpSums(int block)
      : block_(block),
        quarter_(__shfl_sync(~0u, threadIdx.x / 32, 0) % 4),
        a_(row()),
        b_(column()),
        offset_a_(offsetof(Stage, a) + block / Config::kColumns * sizeof(DoubleBlock)),
        offset_b_(offsetof(Stage, b) + block % Config::kColumns * sizeof(DoubleBlock)) {}

  // Whether a stage with this mask is valid for the warp.
  __device__ bool needs(const Mask<Config>& mask) const {
    const int within = Config::kParts == 1 ? 0 : quarter_ % 2 * 2 + quarter_ / 2;
    return mask.words[0] >> (block_ * Config::kBlockBits + within) & 1;
  }

  // Adds a stage's product.
  __device__ __forceinline__ void add(const Stage& stage) {
    const uint32_t at = shared_address(&stage);
    double a[2][4];
    a_.template load<0>(at + offset_a_, a[0][0], a[0][2]);
    a_.template load<1>(at + offset_a_, a[0][1], a[0][3]);
    a_.template load<2>(at + offset_a_, a[1][0], a[1][2]);
    a_.template load<3>(at + offset_a_, a[1][1], a[1][3]);
    add_columns<0>(at, a);
    add_columns<1>(at, a);
    add_columns<2>(at, a);
    add_columns<3>(at, a);
  }

  // Stores the sums and resets them.
  __device__ __forceinline__ void store(const MultiplyParams<double>& p, Tile tile) {
    const int64_t first_row = (tile.row + block_ / Config::kColumns) * kBlock + row();
    const int64_t first_column = (tile.column + block_ % Config::kColumns) * kBlock + column();
    const bool whole = first_row + 32 <= p.m && first_column + 32 <= p.n && p.n % 2 == 0;
    if (whole && p.input == nullptr) {
      store<true>(p, tile.batch, first_row, first_column);
    } else {
      store<false>(p, tile.batch, first_row, first_column);
    }
  }

 private:
  __device__ int row() const { return quarter_ / 2 * 32; }
  __device__ int column() const { return quarter_ % 2 * 32; }

  template <int kEighth>
  __device__ __forceinline__ void add_columns(uint32_t stage, const double (&a)[2][4]) {
    double even, odd;
    b_.template load<kEighth>(stage + offset_b_, even, odd);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      mma_f64_sm90(sums_[r][kEighth], a[r][0], a[r][1], a[r][2], a[r][3], even, odd);
    }
  }

  template <bool kPairs>
  __device__ __forceinline__ void store(const MultiplyParams<double>& p, int batch, int64_t row,
                                        int64_t column) {
    const int lane = threadIdx.x % 32;
    row += lane / 4, column += lane % 4 * 2;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          double* const pair = sums_[r][c] + 2 * half;
          store_pair<kPairs>(p, batch, row + 16 * r + 8 * half, column + 8 * c, pair[0], pair[1]);
          pair[0] = pair[1] = 0;
        }
      }
    }
  }

  int block_, quarter_;
  LaneView<Config::kMajorA> a_;
  LaneView<Config::kMajorB> b_;
  uint32_t offset_a_, offset_b_;
  double sums_[2][4][4] = {};
};

// The warps of block `block` of a tile.
template <class Config>
__device__ void multiply_doubles(const DoubleProduct& params, int block, Storage<Config>& storage) {
  WarpSums<Config> sums(block);
  RingPosition<Config::kStages> at;
  while (true) {
    storage.full[at.slot].wait(at.phase);
    const auto& notice = storage.notices[at.slot];
    const End ends = notice.ends;
    if (ends == End::kWork) break;
    if (sums.needs(notice.mask)) sums.add(storage.stages[at.slot]);
    const bool ends_tile = ends == End::kTile;
    const Tile tile = ends_tile ? storage.tiles[at.slot] : Tile{};
    __syncwarp();
    if (threadIdx.x % 32 == 0) storage.empty[at.slot].arrive();
    at.advance();
    if (ends_tile) sums.store(params.product, tile);
  }
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerSm)
    multiply_dmma_sm90(const __grid_constant__ DoubleProduct params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // the same build's other targets hold an empty kernel
  extern __shared__ __align__(1024) uint8_t shared[];
  auto& storage = *reinterpret_cast<Storage<Config>*>(shared);
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  const bool elected = threadIdx.x % 32 == 0;
  if (warp == 0 && elected) storage.initialize();
  __syncthreads();

  if (warp >= 4) {
    if constexpr (Config::kMovesRegisters) cutlass::arch::warpgroup_reg_alloc<104>();
    multiply_doubles<Config>(params, warp / 4 - 1, storage);
  } else {
    if constexpr (Config::kMovesRegisters) cutlass::arch::warpgroup_reg_dealloc<64>();
    if (warp >= 2) {
      list_steps<Config>(params, warp - 2, storage);
    } else if (warp == 1 && elected) {
      load_lists<Config, false>(params, storage);
    } else if (warp == 0 && elected) {
      load_lists<Config, true>(params, storage);
    }
  }
#endif
}

}  // namespace spamm::kernels::sm90
