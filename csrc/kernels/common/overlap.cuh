// Programmatic dependent launch: a kernel starts while earlier kernels of its stream still run.
// Both functions do nothing before sm_90, or if the launch did not ask for the overlap.
//
// Invariant: every thread block of such a kernel waits before it reads or writes global memory. So
// when the kernel ends, all kernels before it have ended, however early they let others start.
#pragma once

#include <cuda_runtime.h>

namespace spamm::kernels {

// Once all thread blocks have called this, the next kernel may start on the free parts of the
// device. It must call wait_for_previous_kernel() before it touches this kernel's memory.
__device__ inline void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();
#endif
}

// Returns when the previous kernel has ended and its writes are visible.
__device__ inline void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
#endif
}

}  // namespace spamm::kernels
