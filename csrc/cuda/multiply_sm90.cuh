// The launch that multiply_sm90_*.cu share.
#pragma once

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>

#include "kernels/multiply_sm90_launch.cuh"
#include "multiply_launch.h"

namespace spamm::cuda {

// The counter of claimed tiles, from the allocator's blocks of the current stream, so that no other
// launch has it meanwhile.
class TileCounter {
 public:
  int* get() const { return static_cast<int*>(memory_.get()); }

 private:
  c10::DataPtr memory_ = c10::cuda::CUDACachingAllocator::get()->allocate(sizeof(int));
};

template <class Element>
void launch_multiply_sm90(const kernels::MultiplyParams<float>& params, Tile tile,
                          int multiprocessors, cudaStream_t stream) {
  using kernels::sm90::TileSize;
  const TileCounter next_tile;
  const auto size = tile == Tile::kLarge ? TileSize::k128x256 : TileSize::k128x64;
  C10_CUDA_CHECK(
      kernels::sm90::multiply<Element>(params, size, multiprocessors, next_tile.get(), stream));
}

}  // namespace spamm::cuda
