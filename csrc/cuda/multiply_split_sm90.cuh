// The launch that multiply_sm90_f32x*.cu share.
#pragma once

#include "kernels/multiply_split_sm90_launch.cuh"
#include "multiply_sm90.cuh"

namespace spamm::cuda {

template <int kHalves>
void launch_multiply_split(const kernels::MultiplyParams<float>& params,
                           const kernels::SplitSource& a, const kernels::SplitSource& b, Tile tile,
                           int multiprocessors, cudaStream_t stream) {
  using kernels::sm90::SplitTileSize;
  const auto size = tile == Tile::kLarge ? SplitTileSize::kLarge : SplitTileSize::kSmall;
  with_counter(params, [&](const auto& p) {
    return kernels::sm90::multiply_split<kHalves>(p, a, b, size, multiprocessors, stream);
  });
}

}  // namespace spamm::cuda
