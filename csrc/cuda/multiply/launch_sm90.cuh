// The launch that instances/sm90_*.cu share.
#pragma once

#include <c10/cuda/CUDAException.h>

#include <optional>

#include "cuda/multiply/launch.h"
#include "cuda/tile_counter.h"
#include "kernels/multiply/sm90/launch.cuh"

namespace spamm::cuda {

// Calls launch(params) with a counter of tiles.
template <class Norm, class Launch>
void with_counter(kernels::MultiplyParams<Norm> params, const Launch& launch) {
  std::optional<TileCounter> own;
  if (params.next_tile == nullptr) params.next_tile = own.emplace().get();
  C10_CUDA_CHECK(launch(params));
}

template <class Element>
void launch_multiply_sm90(const kernels::MultiplyParams<float>& params, Tile tile,
                          int multiprocessors, cudaStream_t stream) {
  using kernels::sm90::TileSize;
  const auto size = tile == Tile::kLarge ? TileSize::k128x256 : TileSize::k128x64;
  with_counter(params, [&](const auto& p) {
    return kernels::sm90::multiply<Element>(p, size, multiprocessors, stream);
  });
}

}  // namespace spamm::cuda
