// Programmatic dependent launch: a kernel starts while the one before it on the stream still runs.
// Both calls do nothing before sm_90, or where the launch did not ask for it.
#pragma once

#include <cuda_runtime.h>

namespace spamm::kernels {

// Lets the next kernel take what this one leaves of the device, as soon as all thread blocks have
// got here. The next one must wait_for_previous_kernel() before it touches memory of this one.
__device__ inline void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();
#endif
}

// Returns when the kernel before is over and what it has written can be read.
__device__ inline void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
#endif
}

}  // namespace spamm::kernels
