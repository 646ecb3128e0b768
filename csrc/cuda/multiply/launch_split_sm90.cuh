// The launch that instances/sm90_f32x*.cu share.
#pragma once

#include "cuda/multiply/launch_sm90.cuh"
#include "kernels/multiply/sm90/split/launch.cuh"

namespace spamm::cuda {

template <int kSplitParts>
void launch_multiply_split(const kernels::MultiplyParams<float>& params,
                           const kernels::SplitSource& a, const kernels::SplitSource& b, Tile tile,
                           int multiprocessors, cudaStream_t stream) {
  using kernels::sm90::SplitTileSize;
  const auto size = tile == Tile::kLarge ? SplitTileSize::kLarge : SplitTileSize::kSmall;
  with_counter(params, [&](const auto& p) {
    return kernels::sm90::multiply_split<kSplitParts>(p, a, b, size, multiprocessors, stream);
  });
}

}  // namespace spamm::cuda
