// What the launch of a kernel is asked for: the tile, the chip and the stream.
#pragma once

struct CUstream_st;  // so that tests of the tiles need no CUDA toolkit

namespace spamm::kernels {

// Large tiles read each operand less often; small ones spread a small result over more of the chip;
// narrow ones hold few output channels of a convolution.
enum class TileSize { kSmall, kLarge, kNarrow };

// The part of the result that a thread block computes at a time. cuda/tiles.h lists them all.
struct TileConfig {
  int rows, columns;
  int warp_rows, warp_columns;  // of them, by one warp (sm_80) or warpgroup (sm_90)
  int stages;                   // of the shared-memory ring
  int blocks_per_multiprocessor;
};

// The tiles of one kernel; all zero where it has none of a size.
struct Tiles {
  TileConfig small, large, narrow;
};

struct Launch {
  TileSize tile;
  int multiprocessors;
  CUstream_st* stream;  // a cudaStream_t
  int group_rows = 0;   // tile rows that a Hopper product walks together
};

}  // namespace spamm::kernels
