// The launch that multiply_sm90_*.cu share.
#pragma once

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>

#include "kernels/multiply_sm90_launch.cuh"
#include "multiply_launch.h"

namespace spamm::cuda {

template <class Element>
void launch_multiply_sm90(const kernels::MultiplyParams<float>& params, Tile tile,
                          int multiprocessors, cudaStream_t stream) {
  using kernels::sm90::TileSize;
  // From the allocator's blocks of the current stream, so no other launch has it meanwhile.
  const c10::DataPtr next_tile = c10::cuda::CUDACachingAllocator::get()->allocate(sizeof(int));
  const auto size = tile == Tile::kLarge ? TileSize::k128x256 : TileSize::k128x64;
  C10_CUDA_CHECK(kernels::sm90::multiply<Element>(params, size, multiprocessors,
                                                  static_cast<int*>(next_tile.get()), stream));
}

}  // namespace spamm::cuda
