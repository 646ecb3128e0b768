// The order of the tiles of C.
#pragma once

#include <cuda_runtime.h>

namespace spamm::kernels {

struct TileIndex {
  int batch, row, column;
};

// Tile rows form groups of kGroupRows. Within a group the order is column by column, so that tiles
// in flight at the same time share rows of A and columns of B in the L2 cache. No memory holds 2^31
// tiles, so their numbers fit an int.
template <int kGroupRows>
struct TileOrder {
  int rows, columns;  // of one batch, in tiles

  __device__ int per_batch() const { return rows * columns; }

  __device__ TileIndex operator[](int tile) const {
    const int batch = tile / per_batch(), in_batch = tile - batch * per_batch();
    const int group = in_batch / (kGroupRows * columns);
    const int in_group = in_batch - group * kGroupRows * columns;
    const int group_rows = min(kGroupRows, rows - group * kGroupRows);
    return {batch, group * kGroupRows + in_group % group_rows, in_group / group_rows};
  }
};

}  // namespace spamm::kernels
