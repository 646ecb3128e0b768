// The counter of claimed tiles of kernels whose thread blocks take tiles in turn.
#pragma once

#include <c10/cuda/CUDACachingAllocator.h>

namespace spamm::cuda {

// An int in device memory, from the allocator's blocks of the current stream, so that no other
// launch, on whatever stream or in whatever graph, has it meanwhile.
class TileCounter {
 public:
  int* get() const { return static_cast<int*>(memory_.get()); }

 private:
  c10::DataPtr memory_ = c10::cuda::CUDACachingAllocator::get()->allocate(sizeof(int));
};

}  // namespace spamm::cuda
