// The order in which thread blocks meet the tiles of C.
#pragma once

#include <cuda_runtime.h>

namespace spamm::kernels {

struct TileIndex {
  int batch, row, column;
};

// Tiles run down groups of kGroupRows tile rows, one column after the other, so that the tiles in
// flight together share rows of A and columns of B in the L2 cache. There are fewer than 2^31
// tiles: no memory holds that many.
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
