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
cudaError_t multiply_doubles_in(const MultiplyParams<double>& p, const Launch& how,
                                const SegmentMemory& segments, bool edges_last) {
  DoubleProduct params{};
  params.segments = segments;
  const int blocks =
      cut_into_tiles<Config>(params, p, how.group_rows, how.multiprocessors * Config::kBlocksPerSm,
                             segments.log2_segments);
  params.edges_last = edges_last && params.folded_edge == 0;
  cudaError_t error = encode_doubles<Config::kMajorA>(params.map_a, layout(p.a, p.m, p.k, p.batch));
  if (error == cudaSuccess) {
    error = encode_doubles<Config::kMajorB>(params.map_b, layout(p.b, p.n, p.k, p.batch));
  }
  if (error == cudaSuccess && p.own_rows > 0) {
    error = encode_doubles<Config::kMajorB>(params.map_own_b, layout(p.own_b, p.n, p.own_rows, 1));
  }
  if (error != cudaSuccess) return error;
  return start<Config>(multiply_dmma_sm90<Config>, params, blocks, how.stream, segments.pieces);
}

// Whether half or more of the last block of rows or columns lies outside C. A small tile then skips
// what lies outside.
inline bool has_light_edges(const MultiplyParams<double>& p) {
  const auto is_light = [](int64_t size) {
    return size % kBlock != 0 && size % kBlock <= kBlock / 2;
  };
  return is_light(p.m) || is_light(p.n);
}

template <Tiles kTiles>
cudaError_t multiply_doubles(const MultiplyParams<double>& p, const Launch& how,
                             const SegmentMemory& segments) {
  const bool edges_last = how.tile == TileSize::kSmall && has_light_edges(p);
  const auto run = [&]<bool kAlongA, bool kAlongB, bool kLarge>(std::bool_constant<kAlongA>,
                                                                std::bool_constant<kAlongB>,
                                                                std::bool_constant<kLarge>) {
    constexpr TileConfig kTile = kLarge ? kTiles.large : kTiles.small;
    // Kernels with granules of 64 read fewer norms, which saves 0.4%.
    using Chosen = DoubleConfig<major(kAlongA), major(kAlongB), 32, kTile.rows / kBlock>;
    static_assert(kHasTile<Chosen, kTile> &&
                  Chosen::kBlocksPerSm == kTile.blocks_per_multiprocessor);
    return multiply_doubles_in<Chosen>(p, how, segments, edges_last);
  };
  return with_constants(run, p.a.k_major, p.b.k_major, how.tile == TileSize::kLarge);
}

template <class Config>
cudaError_t multiply_listed_doubles_in(const MultiplyParams<double>& p, const ProductLists& lists,
                                       const Launch& how) {
  ParamsOf<Config, DoubleProduct> params{};
  const ListedLayouts layouts(p, lists);
  cudaError_t error = encode_doubles<Config::kMajorA>(params.map_a, layouts.a);
  if (error == cudaSuccess) error = encode_doubles<Config::kMajorB>(params.map_b, layouts.b);
  if (error != cudaSuccess) return error;
  return start_listed<Config>(multiply_dmma_sm90<Config>, params, p, lists, how);
}

template <Tiles kTiles>
cudaError_t multiply_listed_doubles(const MultiplyParams<double>& p, const ProductLists& lists,
                                    const Launch& how) {
  const auto run = [&]<bool kEdgeOf32, bool kLarge>(std::bool_constant<kEdgeOf32>,
                                                    std::bool_constant<kLarge>) {
    constexpr TileConfig kTile = kLarge ? kTiles.large : kTiles.small;
    using Dense = DoubleConfig<Major::K, Major::MN, kEdgeOf32 ? 32 : 64, kTile.rows / kBlock>;
    return multiply_listed_doubles_in<Listed<Dense>>(p, lists, how);
  };
  return with_tile(run, p, how);
}

}  // namespace spamm::kernels::multiply::sm90
