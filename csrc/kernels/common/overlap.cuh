// Programmatic dependent launch: a kernel starts while the kernels ahead of it on the stream still
// run. Both calls do nothing before sm_90, or where the launch did not ask for it.
//
// Invariant: in a kernel launched so, every thread block waits, and what it reads or writes in
// global memory comes after that. Its end then implies the end of all kernels ahead of it, however
// early these let their successors start. The one exception is reading a weight whose caller passes
// weight_is_ready: complete before the call was made, or before each replay of a captured graph.
#pragma once

#include <cuda_runtime.h>

namespace spamm::kernels {

// Lets the next kernel run on what this one does not use of the device, as soon as all thread
// blocks have got here. The next one must wait_for_previous_kernel() before it touches memory of
// this one.
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
