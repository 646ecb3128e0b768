// Starts the Hopper multiply of a block-sparse product of float32 operands in split parts.
#pragma once

#include "kernels/multiply/sm90/launch_listed.cuh"
#include "kernels/multiply/sm90/split/launch.cuh"
#include "kernels/multiply/sm90/split/listed_terms.cuh"

namespace spamm::kernels::multiply::sm90 {

template <class Config>
cudaError_t multiply_listed_split_in(const MultiplyParams<float>& p, const ProductLists& lists,
                                     const SplitSource& a, const SplitSource& b, int16_t* terms,
                                     const Launch& how) {
  ParamsOf<Config, SplitProduct> params{};
  params.a = a;
  params.b = b;
  params.terms = terms;
  const LargestTermsParams largest{p, a.split, b.split, false, false, terms, Config::kTermsOverTau};
  const cudaError_t error = launch_listed_terms<Config::kGranules>(largest, lists, how.stream);
  if (error != cudaSuccess) return error;
  return start_listed<Config>(multiply_split_sm90<Config>, params, p, lists, how);
}

// As multiply_split(). One split part takes no blocks of 32. `terms` is room for a number for each
// granule of C's cells.
template <int kSplitParts, Tiles kTiles>
cudaError_t multiply_listed_split(const MultiplyParams<float>& p, const ProductLists& lists,
                                  const SplitSource& a, const SplitSource& b, int16_t* terms,
                                  const Launch& how) {
  const auto run = [&]<bool kEdgeOf32, bool kLarge>(std::bool_constant<kEdgeOf32>,
                                                    std::bool_constant<kLarge>) {
    constexpr TileConfig kTile = kLarge ? kTiles.large : kTiles.small;
    constexpr int kGranule = kSplitParts == 2 && kEdgeOf32 ? 32 : kBlock;
    using Dense = SplitConfig<kSplitParts, Major::K, Major::MN, kGranule, kTile.rows / kBlock,
                              kTile.columns / kBlock, kTile.warp_columns / kBlock, kTile.stages>;
    return multiply_listed_split_in<Listed<Dense>>(p, lists, a, b, terms, how);
  };
  return with_tile(run, p, how);
}

}  // namespace spamm::kernels::multiply::sm90
