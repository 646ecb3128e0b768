// Parameters of a kernel launch: tile, multiprocessors and stream.
#pragma once

struct CUstream_st;  // so that tests of the tiles need no CUDA toolkit

namespace spamm::kernels {

constexpr int kMostSharedBytes = 227 * 1024;  // of a thread block on Hopper

// Large tiles read each operand less often. Small tiles spread a small result over more
// multiprocessors. Narrow tiles serve convolutions with few output channels, and products of short
// K. Medium and square ones serve products of which the others would leave much of the chip idle.
enum class TileSize { kSmall, kLarge, kNarrow, kMedium, kSquare };

// The part of the result that a thread block computes at a time. All tiles stand in cuda/tiles.h.
struct TileConfig {
  int rows, columns;
  int warp_rows, warp_columns;  // the part of one warp (sm_80) or warpgroup (sm_90)
  int stages;                   // of the shared-memory ring
  int blocks_per_multiprocessor;
};

// A tile of the convolution that skips nothing (conv/sm90/unskipped.cuh). Two warpgroups have 64
// channels each of all pixels, or half of the pixels each.
struct UnskippedTile {
  static constexpr int kWarpgroups = 2;
  static constexpr int kStagings = 2;  // of a warpgroup: one is filled while the other is stored
  static constexpr int kLeastStages = 3;
  int channels, pixels;

  // Pixels of a warpgroup, and those that it stores at a time.
  constexpr int width() const { return channels == 64 ? pixels / kWarpgroups : pixels; }
  constexpr int stored() const { return width() / (width() < 160 || width() % 32 != 0 ? 2 : 4); }

  // Stages of a line of the input's channels that fit shared memory. `bytes`: of an entry. 64
  // channels of the output are a line of half types, and two of float32.
  constexpr int stages(int bytes) const {
    constexpr int kLineBytes = 128, kBarriers = 1024;
    const int staged = kWarpgroups * kStagings * stored() * 64 * bytes;
    return (kMostSharedBytes - kBarriers - staged) / ((channels + pixels) * kLineBytes);
  }

  constexpr bool exists(int bytes) const { return stages(bytes) >= kLeastStages; }

  bool operator==(const UnskippedTile&) const = default;
};

constexpr int kShortDepth = 128;  // the longest K of narrow tiles of a product

// The tiles of one kernel. A size that the kernel does not have is all zero.
struct Tiles {
  TileConfig small, large, narrow, medium, square;
};

// Packed rows (conv/sm80/packed.cuh): thread blocks that a multiprocessor has room for at least,
// and slices of K that share a medium tile.
constexpr int kPackedBlocks = 3, kPackedSlices = 4;

// The memory in which thread blocks meet that share the steps of a tile, of one product. With one
// segment nothing of it is used. A piece is what one warp computes of a tile.
struct SegmentMemory {
  int log2_segments = 0;
  int pieces = 0;
  unsigned* meetings = nullptr;  // one for each piece. Follow next_tile, and begin as zeros
};

// On sm_90. Four warps compute what TileConfig says of a warpgroup.
constexpr int pieces_of_tile(const TileConfig& tile) {
  return 4 * tile.rows * tile.columns / (tile.warp_rows * tile.warp_columns);
}

struct Launch {
  TileSize tile;
  int multiprocessors;
  CUstream_st* stream;  // a cudaStream_t
  int group_rows = 0;   // tile rows in a group (multiply/sm90/list.cuh: tile_at)
  SegmentMemory segments = {};
};

}  // namespace spamm::kernels
