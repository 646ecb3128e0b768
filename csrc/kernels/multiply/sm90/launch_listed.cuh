// Starts the Hopper multiply of a block-sparse product (listed.cuh).
#pragma once

#include "kernels/multiply/sm90/launch.cuh"
#include "kernels/multiply/sm90/listed.cuh"

namespace spamm::kernels::multiply::sm90 {

// The layouts of A, of B and of C.
template <class Norm>
struct ListedLayouts {
  MatrixLayout a, b, c;

  ListedLayouts(const MultiplyParams<Norm>& p, const ProductLists& lists)
      : a(layout(p.a, lists.rows_a, p.k, 1)),
        b(layout(p.b, p.n, lists.rows_b, 1)),
        c{p.c, p.n, p.m, p.c_leading, 1, 0} {}
};

// Starts a kernel whose other parameters are set.
template <class Config, class Params, class Norm>
cudaError_t start_listed(void (*kernel)(Params), Params& params, const MultiplyParams<Norm>& p,
                         const ProductLists& lists, const Launch& how) {
  constexpr int kPerMultiprocessor = std::is_same_v<Norm, double> ? Config::kBlocksPerSm : 1;
  params.product = p;
  params.lists = lists;
  params.claims_tiles = true;
  const int blocks = std::min(lists.capacity, how.multiprocessors * kPerMultiprocessor);
  return start<Config>(kernel, params, blocks, how.stream);
}

// Calls run(edge of 32, large tile) with constants.
template <class Run, class Norm>
cudaError_t with_tile(const Run& run, const MultiplyParams<Norm>& p, const Launch& how) {
  return with_constants(run, has_edge_of_32(p), how.tile == TileSize::kLarge);
}

template <class Config>
cudaError_t multiply_listed_in(const MultiplyParams<float>& p, const ProductLists& lists,
                               const Launch& how) {
  using Element = typename Config::Element;
  ParamsOf<Config, Params> params{};
  params.c_by_tma = true;
  const ListedLayouts layouts(p, lists);
  cudaError_t error = encode<Element>(params.map_a, layouts.a, kBlock);
  if (error == cudaSuccess) error = encode<Element>(params.map_b, layouts.b, kBlock);
  if (error == cudaSuccess) error = encode<Element>(params.map_c, layouts.c, kWarpRows);
  if (error != cudaSuccess) return error;
  return start_listed<Config>(multiply_sm90<Config>, params, p, lists, how);
}

// Computes p over `lists`. A is K-major, and B is not.
template <class Element, Tiles kTiles>
cudaError_t multiply_listed(const MultiplyParams<float>& p, const ProductLists& lists,
                            const Launch& how) {
  const auto run = [&]<bool kEdgeOf32, bool kLarge>(std::bool_constant<kEdgeOf32>,
                                                    std::bool_constant<kLarge>) {
    constexpr TileConfig kTile = kLarge ? kTiles.large : kTiles.small;
    using Dense = Config<Element, Major::K, Major::MN, kEdgeOf32 ? 32 : 64, kTile.rows / kBlock,
                         kTile.columns / kBlock, kTile.warp_columns / kBlock, kTile.stages>;
    return multiply_listed_in<Listed<Dense>>(p, lists, how);
  };
  return with_tile(run, p, how);
}

}  // namespace spamm::kernels::multiply::sm90
