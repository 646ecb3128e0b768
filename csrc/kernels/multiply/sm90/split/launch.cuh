// Starts the Hopper multiply of float32 operands in split parts, of dense and of block-sparse
// matrices.
#pragma once

#include <cuda_runtime.h>

#include "kernels/multiply/sm90/launch.cuh"
#include "kernels/multiply/sm90/split/largest_terms.cuh"
#include "kernels/multiply/sm90/split/listed_terms.cuh"
#include "kernels/multiply/sm90/split/multiply.cuh"

namespace spamm::kernels::multiply::sm90 {

template <class Config>
cudaError_t multiply_split_in(const MultiplyParams<float>& p, const ProductLists* lists,
                              const SplitSource& a, const SplitSource& b, int16_t* terms,
                              const Launch& how) {
  ParamsOf<Config, SplitProduct> params{};
  params.a = a;
  params.b = b;
  params.terms = terms;
  const int blocks = set_product<Config>(params, p, lists, how);
  const LargestTermsParams largest{
      p, a.split, b.split, params.a_has_batch, params.b_has_batch, terms, Config::kTermsOverTau};
  cudaError_t error;
  if constexpr (Config::kListed) {
    error = launch_listed_terms<Config::kGranules>(largest, *lists, how.stream);
  } else {
    error = launch_largest_terms<Config::kGranules>(largest, how.stream);
  }
  if (error != cudaSuccess) return error;
  return start<Config>(multiply_split_sm90<Config>, params, blocks, how.stream);
}

// Computes p, or the products of `lists` unless they are null, from the split operands a and b. Of
// p.a and p.b it only uses whether the batch stride is 0. `terms` is room for a number for each
// granule of the whole blocks of C, or of its cells. One split part takes block edges of 64 and
// more.
template <int kSplitParts, Tiles kTiles>
cudaError_t multiply_split(const MultiplyParams<float>& p, const ProductLists* lists,
                           const SplitSource& a, const SplitSource& b, int16_t* terms,
                           const Launch& how) {
  const auto run = [&]<bool kListed, bool kEdgeOf32, bool kLarge>(std::bool_constant<kListed>,
                                                                  std::bool_constant<kEdgeOf32>,
                                                                  std::bool_constant<kLarge>) {
    constexpr TileConfig kTile = kLarge ? kTiles.large : kTiles.small;
    constexpr int kGranule = kSplitParts == 2 && kEdgeOf32 ? 32 : kBlock;
    using Dense = SplitConfig<kSplitParts, kGranule, kTile.rows / kBlock, kTile.columns / kBlock,
                              kTile.warp_columns / kBlock, kTile.stages>;
    static_assert(kHasTile<Dense, kTile>);
    return multiply_split_in<ListedIf<kListed, Dense>>(p, lists, a, b, terms, how);
  };
  return with_constants(run, lists != nullptr, has_edge_of_32(p), how.tile == TileSize::kLarge);
}

}  // namespace spamm::kernels::multiply::sm90
