// Parameters of a kernel launch: tile, multiprocessors and stream.
#pragma once

struct CUstream_st;  // so that tests of the tiles need no CUDA toolkit

namespace spamm::kernels {

// Large tiles read each operand less often. Small tiles spread a small result over more
// multiprocessors. Narrow tiles serve convolutions with few output channels.
enum class TileSize { kSmall, kLarge, kNarrow };

// The part of the result that a thread block computes at a time. All tiles stand in cuda/tiles.h.
struct TileConfig {
  int rows, columns;
  int warp_rows, warp_columns;  // the part of one warp (sm_80) or warpgroup (sm_90)
  int stages;                   // of the shared-memory ring
  int blocks_per_multiprocessor;
};

// A tile of the convolution that skips nothing (conv/sm90/unskipped.cuh).
struct UnskippedTile {
  int channels, pixels;

  bool operator==(const UnskippedTile&) const = default;
};

// The tiles of one kernel. A size that the kernel does not have is all zero.
struct Tiles {
  TileConfig small, large, narrow;
};

struct Launch {
  TileSize tile;
  int multiprocessors;
  CUstream_st* stream;  // a cudaStream_t
  int group_rows = 0;   // tile rows in a group (multiply/sm90/list.cuh: tile_at)
};

}  // namespace spamm::kernels
