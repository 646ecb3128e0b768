// The parameters that the launcher of the Hopper multiply adds to MultiplyParams.
#pragma once

#include <cuda.h>

#include <type_traits>

#include "kernels/common/tile.h"
#include "kernels/multiply/params.h"

namespace spamm::kernels::multiply::sm90 {

// A product, and how its result is cut into tiles.
template <class Norm>
struct TiledProduct {
  MultiplyParams<Norm> product;
  int tiles, tile_rows, tile_columns;  // tiles: of all batches and segments; the others: of one
  // Not 0: only tiles on and above the diagonal, so many along it, are computed. Rows and columns
  // are then those of the folded grid (common/parameters.h).
  int folded_edge;
  int inner_rows, inner_columns;  // of tiles that do not lie outside C for the most part
  int group_rows;                 // tile rows of a group, see tile_at() in list.cuh
  SegmentMemory segments;         // of each tile (list.cuh); one without kSegmented
  bool a_has_batch, b_has_batch;  // false: all batches share the operand
  bool claims_tiles;              // false: every tile has a thread block of its own
  int turn;                       // not 0: tiles loaded at a time, see keep_pace() in list.cuh
};

// The place of a row of B.
struct RowOfB {
  const CUtensorMap& map;
  int row;
};

template <class Params>
__device__ __forceinline__ RowOfB find_row_of_b(const Params& params, int k) {
  const int own = k - static_cast<int>(params.product.first_own_row);
  const bool is_own = static_cast<uint32_t>(own) < params.product.own_rows;
  return {is_own ? params.map_own_b : params.map_b, is_own ? own : k};
}

// Base: the parameters of a kernel.
template <class Config, class Base>
struct ListedParams : Base {
  ProductLists lists;
};
template <class Config, class Base>
using ParamsOf = std::conditional_t<Config::kListed, ListedParams<Config, Base>, Base>;

struct Params : TiledProduct<float> {
  CUtensorMap map_a, map_b, map_own_b, map_c;
  bool c_by_tma;  // false: map_c is not set, as C's rows do not start at multiples of 16 bytes
};

}  // namespace spamm::kernels::multiply::sm90
