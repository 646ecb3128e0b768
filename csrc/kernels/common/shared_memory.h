// Allows a kernel more shared memory than the 48 KiB that need no leave.
#pragma once

#include <cuda_runtime.h>

#include "kernels/common/per_kernel.h"
#include "kernels/common/tile.h"  // kMostSharedBytes

namespace spamm::kernels {

// Allows `kernel` this many bytes of dynamic shared memory on the current device, and prefers the
// largest possible shared memory of a multiprocessor, so that thread blocks of other kernels fit
// beside it. A kernel's calls ask for the same number.
inline cudaError_t allow_shared_memory(const void* kernel, int bytes) {
  static PerKernel<int> known;
  int allowed = 0;
  return known.find(kernel, allowed, [&](int& most) {
    most = bytes;
    const cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (error != cudaSuccess) return error;
    return cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                cudaSharedmemCarveoutMaxShared);
  });
}

}  // namespace spamm::kernels
