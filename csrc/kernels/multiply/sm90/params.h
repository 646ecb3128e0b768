// The parameters of the Hopper multiply beyond MultiplyParams; the launcher fills them in.
#pragma once

#include <cuda.h>

#include "kernels/multiply/params.h"

namespace spamm::kernels::multiply::sm90 {

// The product and its cut into tiles.
template <class Norm>
struct TiledProduct {
  MultiplyParams<Norm> product;
  int tiles, tile_rows, tile_columns;  // of all batches; of one
  int group_rows;                      // tile rows that are walked together
  bool a_has_batch, b_has_batch;       // else all batches share the operand
  bool claims_tiles;                   // else every tile has a thread block of its own
};

struct Params : TiledProduct<float> {
  CUtensorMap map_a, map_b, map_c;
  bool c_by_tma;  // else map_c is void, because C's rows are not in 16 bytes
};

}  // namespace spamm::kernels::multiply::sm90
