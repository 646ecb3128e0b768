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
cudaError_t multiply_split_in(const MultiplyParams<float>& p, const SplitSource& a,
                              const SplitSource& b, int16_t* terms, const Launch& how) {
  SplitProduct params{};
  params.a = a;
  params.b = b;
  params.terms = terms;
  const int blocks = cut_into_tiles<Config>(params, p, how.group_rows, how.multiprocessors);
  const LargestTermsParams largest{
      p, a.split, b.split, params.a_has_batch, params.b_has_batch, terms, Config::kTermsOverTau};
  const cudaError_t error = launch_largest_terms<Config::kGranules>(largest, how.stream);
  if (error != cudaSuccess) return error;
  return start<Config>(multiply_split_sm90<Config>, params, blocks, how.stream);
}

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

// Calls run(Config) with that of the product.
template <int kSplitParts, Tiles kTiles, class Run>
cudaError_t with_split_config(const MultiplyParams<float>& p, const Launch& how, const Run& run) {
  return with_tile(
      [&]<bool kEdgeOf32, bool kLarge>(std::bool_constant<kEdgeOf32>, std::bool_constant<kLarge>) {
        constexpr TileConfig kTile = kLarge ? kTiles.large : kTiles.small;
        constexpr int kGranule = kSplitParts == 2 && kEdgeOf32 ? 32 : kBlock;
        using Chosen =
            SplitConfig<kSplitParts, kGranule, kTile.rows / kBlock, kTile.columns / kBlock,
                        kTile.warp_columns / kBlock, kTile.stages>;
        static_assert(kHasTile<Chosen, kTile>);
        return run(std::type_identity<Chosen>());
      },
      p, how);
}

// Computes p from the split operands a and b. Of p.a and p.b it only uses whether the batch stride
// is 0. `terms` is room for a number for each granule of the whole blocks of C. One split part
// takes block edges of 64 and more.
template <int kSplitParts, Tiles kTiles>
cudaError_t multiply_split(const MultiplyParams<float>& p, const SplitSource& a,
                           const SplitSource& b, int16_t* terms, const Launch& how) {
  return with_split_config<kSplitParts, kTiles>(
      p, how, [&]<class Config>(std::type_identity<Config>) {
        return multiply_split_in<Config>(p, a, b, terms, how);
      });
}

// The same over lists. `terms` is room for a number for each granule of C's cells.
template <int kSplitParts, Tiles kTiles>
cudaError_t multiply_listed_split(const MultiplyParams<float>& p, const ProductLists& lists,
                                  const SplitSource& a, const SplitSource& b, int16_t* terms,
                                  const Launch& how) {
  return with_split_config<kSplitParts, kTiles>(
      p, how, [&]<class Config>(std::type_identity<Config>) {
        return multiply_listed_split_in<Listed<Config>>(p, lists, a, b, terms, how);
      });
}

}  // namespace spamm::kernels::multiply::sm90
