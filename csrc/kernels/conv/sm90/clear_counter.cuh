// Sets a tile counter to zero where no norm kernel does. A kernel, because a memset would keep the
// convolution behind it from starting early.
#pragma once

#include "kernels/common/launch.cuh"
#include "kernels/common/overlap.cuh"

namespace spamm::kernels::conv::sm90 {

__global__ void clear_counter(int* counter) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  if (threadIdx.x == 0) *counter = 0;
}

inline cudaError_t launch_clear_counter(int* counter, cudaStream_t stream) {
  return launch(clear_counter, 1, 32, 0, /*overlap_previous=*/true, stream, counter);
}

}  // namespace spamm::kernels::conv::sm90
