// C = alpha * (A B over valid blocks) + beta * input in float64 on Hopper (sm_90a), by mma.sync.
// Lists, loads, barriers and limits are those of sm90/multiply.cuh. A stage is 32 of K.
//
// Warps: two for each tensor core, because one alone leaves gaps between its instructions. Every
// warp computes the same 32 x 16 piece of each block of the tile, so all warps work even if only
// one block is valid.
// Registers: a stage that is valid for all blocks is multiplied in slices of four k, and the next
// slice is loaded meanwhile, across stages too. The load and list warps give up registers for this.
// Skipping is uniform in a warp and exact for each block product. Sums run in the order of K within
// each segment.
#pragma once

#include <cstdint>

#include "kernels/common/ptx_sm80.cuh"
#include "kernels/multiply/params.h"
#include "kernels/multiply/sm90/launch.cuh"
#include "kernels/multiply/sm90/load.cuh"
#include "kernels/multiply/sm90/multiply.cuh"
#include "kernels/multiply/sm90/pipeline.cuh"

namespace spamm::kernels::multiply::sm90 {

// ---- Segments ----------------------------------------------------------------------------------

// Every warp adds up the sums of its piece of a tile's two segments (list.cuh). The one that is
// done first leaves its sums in C itself, which is then in the L2 cache; the other adds them to its
// own, and stores C. A sum of two does not depend on which is first, so the result does not depend
// on timing. The second waits only while the first is storing.

// The meeting place of the warps of two segments with the same piece of a tile meet. All lanes call
// everything.
class SegmentMeeting {
 public:
  __device__ explicit SegmentMeeting(unsigned* state) : state_(state) {}

  // Tells whether the other has not come. Called once.
  __device__ __forceinline__ bool is_first() const {
    unsigned state = 0;
    if (threadIdx.x % 32 == 0) state = atomicOr(state_, kBegun);
    return __shfl_sync(~0u, state, 0) == 0;
  }

  // Says that the sums of the first are in C, or with `filled` false that they are zeros.
  __device__ __forceinline__ void leave(bool filled) const {
    __syncwarp();
    if (threadIdx.x % 32 != 0) return;
    __threadfence();  // what all lanes have written comes before
    atomicOr(state_, kLeft | (filled ? kFilled : 0));
  }

  // Waits until the first has left its sums. Returns whether they are in C.
  __device__ __forceinline__ bool wait() const {
    unsigned state = 0;
    if (threadIdx.x % 32 == 0) {
      do {
        asm volatile("ld.acquire.gpu.u32 %0, [%1];" : "=r"(state) : "l"(state_) : "memory");
      } while ((state & kLeft) == 0);
    }
    __syncwarp();
    return __shfl_sync(~0u, state, 0) & kFilled;
  }

 private:
  static constexpr unsigned kBegun = 1, kLeft = 2, kFilled = 4;

  unsigned* state_;
};

// Leaves sums in C, where take_pair() of another thread block finds them. kPairs: both columns
// exist, and their address is aligned.
template <bool kPairs>
__device__ __forceinline__ void leave_pair(const MultiplyParams<double>& p, int batch, int64_t row,
                                           int64_t column, double x, double y) {
  double* const at = entry_of_c(p, batch, row, column);
  if constexpr (kPairs) {
    __stcg(reinterpret_cast<double2*>(at), double2{x, y});
  } else if (row < p.m) {
    if (column < p.n) __stcg(at, x);
    if (column + 1 < p.n) __stcg(at + 1, y);
  }
}

// Adds what leave_pair() left.
template <bool kPairs>
__device__ __forceinline__ void take_pair(const MultiplyParams<double>& p, int batch, int64_t row,
                                          int64_t column, double& x, double& y) {
  const double* const at = entry_of_c(p, batch, row, column);
  if constexpr (kPairs) {
    const double2 pair = __ldcg(reinterpret_cast<const double2*>(at));
    x += pair.x, y += pair.y;
  } else if (row < p.m) {
    if (column < p.n) x += __ldcg(at);
    if (column + 1 < p.n) y += __ldcg(at + 1);
  }
}

struct DoubleProduct : TiledProduct<double> {
  CUtensorMap map_a, map_b, map_own_b;
};

// Maps of lines that begin at any entry. TMA reads from multiples of 16 bytes on, which are two
// entries. So even and odd lines have a map each, whose lines begin `shifts` entries, 0 or 1,
// before those of the operand.
struct ShiftedMap {
  CUtensorMap maps[2];
  int shifts[2];
};

struct ShiftedProduct : TiledProduct<double> {
  ShiftedMap map_a, map_b;
};

// An operand block holds 16 of K. If K is contiguous, its 64 lines are 64 rows of A (or columns of
// B). Otherwise it consists of pieces of 16 rows, each with one line for each k.
constexpr int kPieceRows = kLineBytes / sizeof(double), kPieces = kBlock / kPieceRows;
constexpr int kLineDepth = kPieceRows;
constexpr int kPieceBytes = kPieceRows * kLineBytes;  // in both orders

// A tile of kEdge x kEdge blocks and kEdge warpgroups. Every warp works on every block.
template <Major kMajorA_, Major kMajorB_, int kGranule_, int kEdge>
struct DoubleConfig : Config<double, kMajorA_, kMajorB_, kGranule_, kEdge, kEdge, kEdge, 3> {
  static constexpr int kStageDepth = 32, kStageLines = kStageDepth / kLineDepth;
  struct Stage {
    OperandBlock a[kStageLines][kEdge], b[kStageLines][kEdge];
  };
  static constexpr int kBytesPerBlock = kStageLines * sizeof(OperandBlock);
  struct Output {
    StoreRoom<double> rooms[4 * kEdge];  // of each multiplying warp
  };
  // Every lane arrives by itself when it has read a stage, without a __syncwarp before.
  static constexpr int kReleases = 128 * DoubleConfig::kWarpgroups;
  // Launched with 168 registers for each of 384 threads (kEdge 2), or 128 for each of 512.
  static constexpr int kBlocksPerSm = kEdge == 1 ? 2 : 1;
  static constexpr int kMultiplyRegisters = kEdge == 1 ? 152 : 208;
  static constexpr int kOtherRegisters = kEdge == 1 ? 104 : 88;
  static constexpr auto kNextKernel = NextKernel::kAfterTheEnd;
  static constexpr bool kSkipsEdges = kEdge == 1;
  static constexpr bool kShifted = false;  // whether lines of the operands begin at any entry
};

// A stage of one operand in a box of even and one of odd lines, not swizzled, with room for shifts.
// Lanes that read together share a bank only where all lines across K have the same shift. Boxes of
// both orders have as many entries.
struct ShiftedBlock {
  static constexpr int kEntries = 32 * 34;
  template <Major kMajor>
  static constexpr int kLength = kMajor == Major::K ? 34 : 68;  // of a line

  alignas(128) double halves[2][kEntries];
};

template <class Dense>
struct Shifted : Dense {
  static constexpr bool kShifted = true;
  static constexpr int kStageLines = 1, kBytesPerBlock = sizeof(ShiftedBlock);
  struct Stage {
    ShiftedBlock a[1][1], b[1][1];
  };
};

template <class Config>
using ParamsOfDoubles =
    std::conditional_t<Config::kShifted, ShiftedProduct, ParamsOf<Config, DoubleProduct>>;

// Fetches 32 of K, from 32 * `stage` on, into block `i` of one operand of the stage `to`.
template <class Config, bool kIsA>
__device__ __forceinline__ void fetch(const DoubleProduct& params, int batch, int block, int stage,
                                      int i, Barrier& barrier, typename Config::Stage& to) {
  const int first = stage * Config::kStageDepth;
  const auto [map, row] = kIsA ? RowOfB{params.map_a, first} : find_row_of_b(params, first);
  const int line = block * kBlock;
#pragma unroll
  for (int part = 0; part < Config::kStageLines; ++part) {
    OperandBlock& operand = (kIsA ? to.a : to.b)[part][i];
    const int k = row + part * kLineDepth;
    if constexpr ((kIsA ? Config::kMajorA : Config::kMajorB) == Major::K) {
      load_block<Major::K>(map, line, k, batch, barrier, operand);
    } else {
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece) {
        auto& to_piece = reinterpret_cast<OperandBlock&>(operand.bytes[piece * kPieceBytes]);
        load_block<Major::MN>(map, line + piece * kPieceRows, k, batch, barrier, to_piece);
      }
    }
  }
}

template <class Config, bool kIsA>
__device__ __forceinline__ void fetch(const ShiftedProduct& params, int batch, int block, int stage,
                                      int, Barrier& barrier, typename Config::Stage& to) {
  constexpr Major kMajor = kIsA ? Config::kMajorA : Config::kMajorB;
  constexpr bool kAlongK = kMajor == Major::K;
  const int line = block * kBlock / (kAlongK ? 2 : 1);
  const int k = stage * Config::kStageDepth / (kAlongK ? 1 : 2);
  const ShiftedMap& map = kIsA ? params.map_a : params.map_b;
#pragma unroll
  for (int odd = 0; odd < 2; ++odd) {
    auto& half = reinterpret_cast<OperandBlock&>((kIsA ? to.a : to.b)[0][0].halves[odd]);
    load_block<kMajor>(map.maps[odd], line, k, batch, barrier, half);
  }
}

// A lane's part of one operand. An instruction reads groups of eight rows of A (or columns of B);
// lane 4 * g + t holds row g of a group at k = t. A piece of 16 rows has two groups ("eights"). Its
// rows are assigned to them so that 16 lanes, which read together, never share a bank.
template <Major kMajor>
class LaneView {
 public:
  // Views the rows of an operand block from `first_row` on, a multiple of 16.
  __device__ LaneView(int first_row, const CUtensorMap&)
      : offset_(first_row / kPieceRows * kPieceBytes) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    if constexpr (kMajor == Major::K) {
      offset_ += 2 * g * kLineBytes + (2 * (g % 4) ^ t / 2) * 16 + t % 2 * 8;
    } else {
      offset_ += t * kLineBytes + ((g / 2 % 2 * 4 + g / 4) ^ t) * 16 + g % 2 * 8;
    }
  }

  // The row in a piece that is row `g` of group `eight`.
  __device__ static int row(int eight, int g) {
    return kMajor == Major::K ? 2 * g + eight : g / 2 % 2 * 8 + g / 4 * 2 + g % 2 + 4 * eight;
  }

  // The lane's entries of kCount pieces of an operand block, at k = 4 * `slice` + t.
  template <int kCount>
  __device__ __forceinline__ void load(double (&to)[kCount][2], const OperandBlock& operand,
                                       int slice) const {
    const uint32_t at = shared_address(&operand) + offset_;
#pragma unroll
    for (int i = 0; i < 2 * kCount; ++i) {
      const int piece = i / 2, eight = i % 2;
      // An operand block starts at a multiple of 1024 bytes, so the swizzle is an XOR of addresses.
      const uint32_t swizzled = kMajor == Major::K ? (at ^ (slice * 32 + eight * 16))
                                                   : (at ^ (slice % 2 * 64 + eight * 32));
      const int line = kMajor == Major::K ? eight : 4 * slice;
      asm volatile("ld.shared.f64 %0, [%1];"
                   : "=d"(to[piece][eight])
                   : "r"(swizzled + piece * kPieceBytes + line * kLineBytes));
    }
  }

 private:
  uint32_t offset_;
};

// The same of shifted lines.
template <Major kMajor>
class ShiftedView {
  static constexpr bool kAlongK = kMajor == Major::K;
  static constexpr int kEntry = sizeof(double), kLine = ShiftedBlock::kLength<kMajor> * kEntry;

 public:
  __device__ ShiftedView(int first_row, const ShiftedMap& map) {
    const int lane = threadIdx.x % 32, t = lane % 4, at = first_row + row(0, lane / 4);
#pragma unroll
    for (int i = 0; i < kOffsets; ++i) {
      const int odd = kAlongK ? i : t % 2, line = kAlongK ? at / 2 : t / 2;
      const int entry = odd * ShiftedBlock::kEntries + (kAlongK ? t : at) + map.shifts[odd];
      offsets_[i] = entry * kEntry + line * kLine;
    }
  }

  __device__ static int row(int eight, int g) {
    return g % 2 * 8 + g / 2 % 2 * (kAlongK ? 4 : 2) + g / 4 * (kAlongK ? 2 : 4) + eight;
  }

  template <int kCount>
  __device__ __forceinline__ void load(double (&to)[kCount][2], const ShiftedBlock& operand,
                                       int slice) const {
#pragma unroll
    for (int i = 0; i < 2 * kCount; ++i) {
      const int rows = i / 2 * kPieceRows, eight = i % 2;
      const int past = kAlongK ? rows / 2 * kLine + slice * 4 * kEntry
                               : slice * 2 * kLine + (rows + eight) * kEntry;
      asm volatile("ld.shared.f64 %0, [%1];"
                   : "=d"(to[i / 2][eight])
                   : "r"(shared_address(&operand) + offsets_[kAlongK ? eight : 0] + past));
    }
  }

 private:
  static constexpr int kOffsets = kAlongK ? 2 : 1;  // even and odd rows; k of a lane are alike
  uint32_t offsets_[kOffsets];
};

// A warp's piece of each block of the tile.
template <class Config>
class WarpSums {
  template <Major kMajor>
  using View = std::conditional_t<Config::kShifted, ShiftedView<kMajor>, LaneView<kMajor>>;
  using ViewA = View<Config::kMajorA>;
  using ViewB = View<Config::kMajorB>;
  using Room = StoreRoom<double>;
  static constexpr int kRows = Config::kRows, kColumns = Config::kColumns;
  static constexpr int kWarpColumns = 2 * Config::kWarpgroups;  // two rows of warps
  static constexpr int kHeight = kBlock / 2, kWidth = kBlock / kWarpColumns;
  static constexpr int kPiecesA = kHeight / kPieceRows, kPiecesB = kWidth / kPieceRows;
  static constexpr int kSlices = Config::kStageDepth / 4,
                       kLineSlices = kSlices / Config::kStageLines;

 public:
  __device__ WarpSums(int warp, const ParamsOfDoubles<Config>& params)
      : row_(warp / kWarpColumns * kHeight),
        column_(warp % kWarpColumns * kWidth),
        a_(row_, params.map_a),
        b_(column_, params.map_b) {}

  static constexpr uint32_t kAll = (1u << kRows * kColumns) - 1;

  // A bit for each block of C in whose piece of this warp the stage is valid.
  __device__ uint32_t valid_blocks(const Mask<Config>& mask) const {
    if constexpr (Config::kGranules == 1) return mask.words[0];
    const int within = column_ / Config::kGranule * Config::kGranules + row_ / Config::kGranule;
    uint32_t valid = 0;
#pragma unroll
    for (int block = 0; block < kRows * kColumns; ++block) {
      valid |= (mask.words[0] >> (block * Config::kBlockBits + within) & 1) << block;
    }
    return valid;
  }

  // Loads the first slice of a stage that is valid for all blocks. multiply() expects it loaded.
  __device__ __forceinline__ void begin(const typename Config::Stage& stage) {
    load(slices_[0], stage, 0);
  }

  // Adds the product of a stage that is valid for all blocks. Calls look_ahead() once the last
  // slice of the stage is being loaded, and proceed() before the last slice is multiplied.
  template <class LookAhead, class Proceed>
  __device__ __forceinline__ void multiply(const typename Config::Stage& stage,
                                           const LookAhead& look_ahead, const Proceed& proceed) {
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
      if (slice + 1 < kSlices) load(slices_[(slice + 1) % 2], stage, slice + 1);
      if (slice + 2 == kSlices) look_ahead();
      if (slice + 1 == kSlices) proceed();
      const Slice& x = slices_[slice % 2];
#pragma unroll
      for (int block = 0; block < kRows * kColumns; ++block) {
        multiply_block(block, x.a[block / kColumns], x.b[block % kColumns]);
      }
    }
  }

  // Adds the products of the blocks whose bit is set, one after the other.
  template <int kNext = 0>
  __device__ __forceinline__ void multiply_some(const typename Config::Stage& stage,
                                                uint32_t valid) {
    if constexpr (kNext < kRows * kColumns) {
      if (valid >> kNext & 1) {
        constexpr int kDepth = 4;  // slices in registers at a time
#pragma unroll
        for (int first = 0; first < kSlices; first += kDepth) {
          SliceA a[kDepth];
          SliceB b[kDepth];
#pragma unroll
          for (int i = 0; i < kDepth; ++i) {
            load_a(a[i], stage, kNext / kColumns, first + i);
            load_b(b[i], stage, kNext % kColumns, first + i);
          }
#pragma unroll
          for (int i = 0; i < kDepth; ++i) multiply_block(kNext, a[i], b[i]);
        }
      }
      multiply_some<kNext + 1>(stage, valid);
    }
  }

  // Adds the sums of the tile's other segment, if that came first. Else leaves these for it in C,
  // resets them and returns false. `piece` is the number of the warp's piece in the tile.
  __device__ __forceinline__ bool join(const TiledProduct<double>& params, Tile tile, int piece,
                                       Room& room) {
    const MultiplyParams<double>& p = params.product;
    const auto tiles_along = [](int64_t size) {
      return static_cast<int>((size - 1) / (kBlock * kRows)) + 1;
    };
    const int batch = batch_of<Config>(params, tile);
    const int number =
        (batch * tiles_along(p.m) + tile.row / kRows) * tiles_along(p.n) + tile.column / kColumns;
    constexpr int kPiecesOfTile = 4 * Config::kWarpgroups;
    const SegmentMeeting meeting(params.segments.meetings + number * kPiecesOfTile + piece);
    if (!meeting.is_first()) {
      if (meeting.wait()) exchange<Exchange::kTake>(p, batch, tile, room);
      return true;
    }
    const bool is_filled = has_sums();
    if (is_filled) exchange<Exchange::kLeave>(p, batch, tile, room);
    meeting.leave(is_filled);
    return false;
  }

  // Stores the sums and resets them.
  __device__ __forceinline__ void store(const TiledProduct<double>& params,
                                        const TileOf<Config>& tile, Room& room) {
    const bool apart = log2_segments<Config>(params) != 0 && params.segments.meetings == nullptr;
    exchange<Exchange::kStore>(params.product, batch_of<Config>(params, tile), tile, room, apart);
  }

 private:
  // The ways of sums and C: see store_pair(), leave_pair() and take_pair(). The sums are
  // zeros after the first two.
  enum class Exchange { kStore, kLeave, kTake };

  // Tells whether any sum of the warp is not zero.
  __device__ __forceinline__ bool has_sums() const {
    bool any = false;
#pragma unroll
    for (int i = 0; i < kRows * kColumns * kPiecesA * kPiecesB; ++i) {
      const auto& sums = sums_[i / kPiecesB / kPiecesA][i / kPiecesB % kPiecesA][i % kPiecesB];
#pragma unroll
      for (int j = 0; j < 8; ++j) any |= sums[j / 4][j % 4] != 0;
    }
    return __any_sync(~0u, any);
  }

  // The operands of four k.
  using SliceA = double[kPiecesA][2];
  using SliceB = double[kPiecesB][2];
  struct Slice {
    SliceA a[kRows];
    SliceB b[kColumns];
  };

  __device__ __forceinline__ void load_a(SliceA& to, const typename Config::Stage& stage, int row,
                                         int slice) {
    a_.template load<kPiecesA>(to, stage.a[slice / kLineSlices][row], slice % kLineSlices);
  }

  __device__ __forceinline__ void load_b(SliceB& to, const typename Config::Stage& stage,
                                         int column, int slice) {
    b_.template load<kPiecesB>(to, stage.b[slice / kLineSlices][column], slice % kLineSlices);
  }

  __device__ __forceinline__ void load(Slice& to, const typename Config::Stage& stage, int slice) {
#pragma unroll
    for (int row = 0; row < kRows; ++row) load_a(to.a[row], stage, row, slice);
#pragma unroll
    for (int column = 0; column < kColumns; ++column) load_b(to.b[column], stage, column, slice);
  }

  __device__ __forceinline__ void multiply_block(int block, const SliceA& a, const SliceB& b) {
#pragma unroll
    for (int i = 0; i < kPiecesA; ++i) {
#pragma unroll
      for (int j = 0; j < 2 * kPiecesB; ++j) {
        mma_f64_sm90(sums_[block][i][j / 2][j % 2], a[i][0], a[i][1], b[j / 2][j % 2]);
      }
    }
  }

  // Cells lie in C as a whole, and each has a place of its own.
  template <Exchange kWhat>
  __device__ __forceinline__ void exchange(const MultiplyParams<double>& p, int,
                                           const CellTile<Config>& tile, Room& room, bool) {
    const auto place = [&](int block) { return place_of(p, tile.cells[block]); };
    const auto exists = [&](int block) { return tile.cells[block] >= 0; };
    const auto row = [&](int block) { return place(block).row * kBlock + row_; };
    const auto column = [&](int block) { return place(block).column * kBlock + column_; };
    if (p.input == nullptr) {
      exchange<kWhat, true>(p, 0, exists, row, column, room);
    } else {
      exchange<kWhat, true, true>(p, 0, exists, row, column, room);
    }
  }

  template <Exchange kWhat>
  __device__ __forceinline__ void exchange(const MultiplyParams<double>& p, int batch, Tile tile,
                                           Room& room, bool apart = false) {
    if (apart) batch = tile.batch;
    const int first_row = tile.row * kBlock + row_, first_column = tile.column * kBlock + column_;
    const auto exists = [](int) { return true; };
    const auto row = [&](int block) { return first_row + block / kColumns * kBlock; };
    const auto column = [&](int block) { return first_column + block % kColumns * kBlock; };
    const bool whole =
        (tile.row + kRows) * kBlock <= p.m && (tile.column + kColumns) * kBlock <= p.n;
    constexpr bool kStores = kWhat == Exchange::kStore;
    const bool pairs = whole && p.c_leading % (kStores ? kStoreUnit : 2) == 0;
    if ((pairs && (!kStores || p.input == nullptr)) || apart) {
      exchange<kWhat, true>(p, batch, exists, row, column, room);
    } else if (pairs) {
      exchange<kWhat, true, true>(p, batch, exists, row, column, room);
    } else {
      exchange<kWhat, false>(p, batch, exists, row, column, room);
    }
  }

  // An instruction gives a lane columns 2t and 2t + 1 of a group of eight. These are neighbours in
  // C, unless B is K-major or shifted: then the same column of both groups are neighbours.
  // The functions say of a block whether it is stored, and where the warp's piece begins.
  template <Exchange kWhat, bool kPairs, bool kAdds = false, class Exists, class Row, class Column>
  __device__ __forceinline__ void exchange(const MultiplyParams<double>& p, int batch,
                                           const Exists& exists, const Row& row,
                                           const Column& column, Room& room) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    constexpr bool kAcross = Config::kShifted || Config::kMajorB == Major::K;
#pragma unroll
    for (int block = 0; block < kRows * kColumns; ++block) {
      if (!exists(block)) continue;
      const int first_row = row(block), first_column = column(block);
#pragma unroll
      for (int i = 0; i < 4 * kPiecesA * kPiecesB; ++i) {
        const int piece_a = i / 4 / kPiecesB, piece_b = i / 4 % kPiecesB;
        const int eight = i / 2 % 2, pair = i % 2;
        double(&sums)[2][4] = sums_[block][piece_a][piece_b];
        double& x = kAcross ? sums[0][2 * eight + pair] : sums[pair][2 * eight];
        double& y = kAcross ? sums[1][2 * eight + pair] : sums[pair][2 * eight + 1];
        const int in_piece = kAcross ? ViewB::row(0, 2 * t + pair) : ViewB::row(pair, 2 * t);
        const int piece_row = first_row + piece_a * kPieceRows;
        const int piece_column = first_column + piece_b * kPieceRows;
        const int at_row = ViewA::row(eight, g);
        if constexpr (kWhat == Exchange::kTake) {
          take_pair<kPairs>(p, batch, piece_row + at_row, piece_column + in_piece, x, y);
          continue;
        } else if constexpr (kWhat == Exchange::kLeave) {
          leave_pair<kPairs>(p, batch, piece_row + at_row, piece_column + in_piece, x, y);
        } else if constexpr (kPairs) {
          store_pair<kAdds>(p, batch, piece_row + at_row, piece_column + in_piece, x, y);
        } else {
          room.entries[at_row][in_piece] = x, room.entries[at_row][in_piece + 1] = y;
          if (i % 4 == 3) room.store(p, batch, piece_row, piece_column);
        }
        x = y = 0;
      }
    }
  }

  int row_, column_;
  ViewA a_;
  ViewB b_;
  Slice slices_[2];  // of even and odd slices
  double sums_[kRows * kColumns][kPiecesA][kPiecesB][2][4] = {};
};

// The piece of a tile that a warp computes. Of two thread blocks on a multiprocessor, which are
// half a grid or more apart, one deals the pieces out in the opposite order: where half of their
// tiles is outside C, they keep different tensor cores busy.
template <class Config>
__device__ __forceinline__ int piece_of_warp(int warp) {
  const bool turned = Config::kBlocksPerSm == 2 && 2 * blockIdx.x >= gridDim.x;
  return turned ? 4 * Config::kWarpgroups - 1 - warp : warp;
}

// `warp` counts the multiplying warps.
template <class Config>
__device__ void multiply_doubles(const ParamsOfDoubles<Config>& params, int warp,
                                 Storage<Config>& storage) {
  const int piece = piece_of_warp<Config>(warp);
  WarpSums<Config> sums(piece, params);
  auto& room = storage.output.rooms[warp];
  constexpr uint32_t kAll = WarpSums<Config>::kAll;
  RingPosition<Config::kStages> at;
  auto& ring = storage.ring;
  typename Notice<Config>::End ends;
  uint32_t valid;
  const auto look_ahead = [&] {
    ring.full[at.slot].wait(at.phase);
    const auto& notice = ring.notices[at.slot];
    ends = notice.ends;
    valid = sums.valid_blocks(notice.mask);
  };
  const auto begin = [&] {
    if (valid == kAll) sums.begin(storage.stages[at.slot]);
  };
  look_ahead();
  begin();
  while (ends != Notice<Config>::End::kWork) {
    const int slot = at.slot;
    const bool ends_tile = ends == Notice<Config>::End::kTile;
    TileOf<Config> tile;
    const auto proceed = [&] {
      if (ends_tile) tile = ring.tiles[slot];
      ring.empty[slot].arrive();
      begin();
    };
    at.advance();
    if (valid == kAll) {
      sums.multiply(storage.stages[slot], look_ahead, proceed);
    } else {
      sums.multiply_some(storage.stages[slot], valid);
      look_ahead();
      proceed();
    }
    if (!ends_tile) continue;
    if constexpr (Config::kSegmented) {
      if (params.segments.meetings != nullptr && !sums.join(params, tile, piece, room)) continue;
    }
    sums.store(params, tile, room);
  }
}

template <class Config>
struct DoubleRoles : ListAndLoad<Config, ParamsOfDoubles<Config>> {
  __device__ __forceinline__ void multiply(int warp) const {
    multiply_doubles<Config>(this->params, warp - kFirstMultiplyWarp, this->storage);
  }
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerSm)
    multiply_dmma_sm90(const __grid_constant__ ParamsOfDoubles<Config> params) {
  run<Config, DoubleRoles>(params);
}

// ---- Launch ------------------------------------------------------------------------------------

// Encodes the map of an operand with the box size that fetch() uses.
template <Major kMajor>
cudaError_t encode_doubles(CUtensorMap& map, const MatrixLayout& x) {
  return encode<double>(map, x, kMajor == Major::K ? kBlock : kLineDepth);
}

template <Major kMajor>
cudaError_t encode_doubles(ShiftedMap& to, const MatrixLayout& x) {
  constexpr int kLength = ShiftedBlock::kLength<kMajor>;
  cudaError_t error = cudaSuccess;
  for (int odd = 0; odd < 2 && error == cudaSuccess; ++odd) {
    const auto* line = static_cast<const double*>(x.data) + odd * x.line_stride;
    const int shift = to.shifts[odd] = reinterpret_cast<uintptr_t>(line) / sizeof(double) % 2;
    // A single line has no neighbour, and is its own: a row outside C, as K has several.
    const int64_t lines = std::max<int64_t>((x.lines + 1 - odd) / 2, 1);
    error = encode<double>(to.maps[odd],
                           {line - shift, x.length + shift, lines, 2 * x.line_stride, x.batch, 0},
                           ShiftedBlock::kEntries / kLength, kLength);
  }
  return error;
}

template <class Config>
cudaError_t multiply_doubles_in(const MultiplyParams<double>& p, const ProductLists* lists,
                                const Launch& how) {
  ParamsOfDoubles<Config> params{};
  const int blocks = set_product<Config>(params, p, lists, how);
  cudaError_t error = encode_doubles<Config::kMajorA>(params.map_a, layout_of_a(p, lists));
  if (error == cudaSuccess) {
    error = encode_doubles<Config::kMajorB>(params.map_b, layout_of_b(p, lists));
  }
  if constexpr (!Config::kShifted) {
    const MatrixLayout own = layout(p.own_b, p.n, p.own_rows, 1);
    if (error == cudaSuccess && p.own_rows > 0)
      error = encode_doubles<Config::kMajorB>(params.map_own_b, own);
  }
  if (error != cudaSuccess) return error;
  return start<Config>(multiply_dmma_sm90<Config>, params, blocks, how.stream,
                       /*alone=*/blocks <= how.multiprocessors);
}

// Lists have no segments.
template <Tiles kTiles>
cudaError_t multiply_doubles(const MultiplyParams<double>& p, const ProductLists* lists,
                             const Launch& how) {
  const auto run = [&]<bool kListed, bool kAlongA, bool kAlongB, bool kEdgeOf32, bool kLarge>(
                       std::bool_constant<kListed>, std::bool_constant<kAlongA>,
                       std::bool_constant<kAlongB>, std::bool_constant<kEdgeOf32>,
                       std::bool_constant<kLarge>) {
    constexpr TileConfig kTile = kLarge ? kTiles.large : kTiles.small;
    // Granules of 64 read fewer norms of dense storage, which saves 0.4%.
    using Dense = DoubleConfig<major(kAlongA), major(kAlongB), kListed && !kEdgeOf32 ? 64 : 32,
                               kTile.rows / kBlock>;
    static_assert(kHasTile<Dense, kTile> && Dense::kBlocksPerSm == kTile.blocks_per_multiprocessor);
    if constexpr (!kListed && !kLarge) {
      if (p.a.by_entry || p.b.by_entry) return multiply_doubles_in<Shifted<Dense>>(p, lists, how);
    }
    return multiply_doubles_in<ListedIf<kListed, Dense>>(p, lists, how);
  };
  return with_layouts(run, p, lists, has_edge_of_32(p), how.tile == TileSize::kLarge);
}

}  // namespace spamm::kernels::multiply::sm90
