// The parameters that the launcher of the Hopper multiply adds to MultiplyParams.
#pragma once

#include <cuda.h>

#include "kernels/multiply/params.h"

namespace spamm::kernels::multiply::sm90 {

// A product, and how its result is cut into tiles.
template <class Norm>
struct TiledProduct {
  MultiplyParams<Norm> product;
  int tiles, tile_rows, tile_columns;  // tiles: all batches; rows and columns: one batch
  int group_rows;                      // tile rows of a group, see tile_at() in list.cuh
  bool a_has_batch, b_has_batch;       // false: all batches share the operand
  bool claims_tiles;                   // false: every tile has a thread block of its own
};

struct Params : TiledProduct<float> {
  CUtensorMap map_a, map_b, map_c;
  bool c_by_tma;  // false: map_c is not set, as C's rows do not start at multiples of 16 bytes
};

}  // namespace spamm::kernels::multiply::sm90
