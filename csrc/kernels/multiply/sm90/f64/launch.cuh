// Starts the Hopper multiply of float64, of dense and of block-sparse matrices.
#pragma once

#include "kernels/multiply/sm90/f64/multiply.cuh"
#include "kernels/multiply/sm90/launch.cuh"

namespace spamm::kernels::multiply::sm90 {

// Encodes the map of an operand with the box size that fetch() uses.
template <Major kMajor>
cudaError_t encode_doubles(CUtensorMap& map, const MatrixLayout& x) {
  return encode<double>(map, x, kMajor == Major::K ? kBlock : kLineDepth);
}

template <class Config>
cudaError_t multiply_doubles_in(const MultiplyParams<double>& p, const ProductLists* lists,
                                const Launch& how) {
  ParamsOf<Config, DoubleProduct> params{};
  const int blocks = set_product<Config>(params, p, lists, how);
  cudaError_t error = encode_doubles<Config::kMajorA>(params.map_a, layout_of_a(p, lists));
  if (error == cudaSuccess) {
    error = encode_doubles<Config::kMajorB>(params.map_b, layout_of_b(p, lists));
  }
  if (error == cudaSuccess && p.own_rows > 0) {
    error = encode_doubles<Config::kMajorB>(params.map_own_b, layout(p.own_b, p.n, p.own_rows, 1));
  }
  if (error != cudaSuccess) return error;
  return start<Config>(multiply_dmma_sm90<Config>, params, blocks, how.stream);
}

// Lists have no segments.
template <Tiles kTiles>
cudaError_t multiply_doubles(const MultiplyParams<double>& p, const ProductLists* lists,
                             const Launch& how) {
  const auto run = [&]<bool kListed, bool kAlongA, bool kAlongB, bool kEdgeOf32, bool kLarge>(
                       std::bool_constant<kListed>, std::bool_constant<kAlongA>,
                       std::bool_constant<kAlongB>, std::bool_constant<kEdgeOf32>,
                       std::bool_constant<kLarge>) {
    constexpr TileConfig kTile = kLarge ? kTiles.large : kTiles.small;
    // Granules of 64 read fewer norms of dense storage, which saves 0.4%.
    using Dense = DoubleConfig<major(kAlongA), major(kAlongB), kListed && !kEdgeOf32 ? 64 : 32,
                               kTile.rows / kBlock>;
    static_assert(kHasTile<Dense, kTile> && Dense::kBlocksPerSm == kTile.blocks_per_multiprocessor);
    return multiply_doubles_in<ListedIf<kListed, Dense>>(p, lists, how);
  };
  return with_layouts(run, p, lists, has_edge_of_32(p), how.tile == TileSize::kLarge);
}

}  // namespace spamm::kernels::multiply::sm90
