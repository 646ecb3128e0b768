// What the Hopper multiply is told beyond MultiplyParams; the launcher fills it in.
#pragma once

#include <cuda.h>

#include "multiply_params.h"
#include "tile_order.cuh"

namespace spamm::kernels::sm90 {

struct Params {
  static constexpr int kGroupRows =
      16;  // measured: 8 and 32 are slower where half or less is valid
  CUtensorMap map_a, map_b, map_c;
  MultiplyParams<float> product;
  TileOrder<kGroupRows> order;
  int tiles;
  bool a_has_batch, b_has_batch;  // else all batches share the operand
  bool c_by_tma;                  // else map_c is void, because C's rows are not in 16 bytes
  int* next_tile;  // zero before and after; null where every tile has a thread block of its own
};

}  // namespace spamm::kernels::sm90
