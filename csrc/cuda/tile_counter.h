// The tile counter of kernels whose thread blocks claim their tiles.
#pragma once

#include <c10/cuda/CUDACachingAllocator.h>

namespace spamm::cuda {

// An int in device memory, allocated on the current stream. No launch on another stream or in
// another graph can use the same memory at the same time.
class TileCounter {
 public:
  int* get() const { return static_cast<int*>(memory_.get()); }

 private:
  c10::DataPtr memory_ = c10::cuda::CUDACachingAllocator::get()->allocate(sizeof(int));
};

}  // namespace spamm::cuda
