// What Hopper's multiply kernels read of a block-sparse product in place of norm maps.
//
// Its matrices are 2-D: stored block e begins at row e * edge, and all have as many columns as a
// block. They are counted in cells of 64 x 64, from left to right and then downwards. Blocks of 128
// are four cells. Of blocks of 32, up to four neighbours are a cell (kernels/sparse/blocks.cuh).
#pragma once

#include <cstdint>

#include "kernels/sparse/pattern.h"

namespace spamm::kernels {

// A tile of C, in tile rows and columns.
struct TilePlace {
  int row, column;
};

constexpr int kTileClasses = 16;  // by the number of products, most products first

struct ProductLists {
  Pattern c;
  const int64_t* first;              // products of block c: from first[c] to first[c + 1] - 1
  const int32_t *slots_a, *slots_b;  // of each product, in the order of k
  Indices col_a;
  int64_t rows_a, rows_b;
  const int32_t *cells_a, *cells_b, *cells_c;  // of each block of 32; else null
  int log2_parts;                              // cells along an edge of a block; 0 for blocks of 32
  bool upper_only;                             // blocks below the diagonal are neither read nor set

  // Tile `n` of a class is places[class * capacity + n].
  TilePlace* places;
  int* counts;  // of each class
  int capacity;
};

}  // namespace spamm::kernels
