// The tiles of a block-sparse C: all of an aligned grid in which a block is stored. Tiles with most
// products come first, in classes of powers of two; in each, roughly from top to bottom, so that
// tiles in flight share operands in L2. No bit of the result depends on their order.
#pragma once

#include <cstdint>

#include "kernels/multiply/lists.h"

namespace spamm::kernels {

constexpr int kFindTilesThreads = 128;

// A tile has height x width parts of blocks. Thread blocks as in blocks.cuh. The first stored block
// of a tile lists it.
static __global__ void __launch_bounds__(kFindTilesThreads)
    find_tiles(const __grid_constant__ ProductLists p, int height, int width) {
  const int row = blockIdx.x, parts = 1 << p.log2_parts, end = p.c.crow[row + 1];
  const auto first_of = [&](int64_t tile, int size) { return tile * size >> p.log2_parts; };
  const auto end_of = [&](int64_t tile, int size) {
    return (((tile + 1) * size - 1) >> p.log2_parts) + 1;
  };
  const auto list = [&](int block, int tile_row, int tile_column) {
    int64_t products = 0;
    bool is_first = true;
    const int last = min(end_of(tile_row, height), int64_t{p.c.rows});
    for (int i = first_of(tile_row, height); i < last; ++i) {
      const int64_t from = first_of(tile_column, width);
      const int begin = p.c.lower_bound(i, p.upper_only ? max(from, int64_t{i}) : from);
      const int past = p.c.lower_bound(i, end_of(tile_column, width));
      if (begin >= past) continue;
      if (is_first && begin != block) return;
      is_first = false;
      products += p.first[past] - p.first[begin];
    }
    const int log2 = 63 - __clzll(products + 1);
    const int number = kTileClasses - 1 - min(log2, kTileClasses - 1);
    const int64_t before = int64_t{number} * p.capacity;
    p.places[before + atomicAdd(p.counts + number, 1)] = {tile_row, tile_column};
  };
  for (int e = p.c.crow[row] + blockIdx.y * blockDim.x + threadIdx.x; e < end;
       e += gridDim.y * blockDim.x) {
    const int column = p.c.col[e];
    if (p.upper_only && column < row) continue;
    for (int i = row * parts / height; i <= (row * parts + parts - 1) / height; ++i)
      for (int j = column * parts / width; j <= (column * parts + parts - 1) / width; ++j)
        list(e, i, j);
  }
}

}  // namespace spamm::kernels
