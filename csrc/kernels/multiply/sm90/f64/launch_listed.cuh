// Starts the Hopper multiply of a block-sparse product of float64.
#pragma once

#include "kernels/multiply/sm90/f64/launch.cuh"
#include "kernels/multiply/sm90/launch_listed.cuh"

namespace spamm::kernels::multiply::sm90 {

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
