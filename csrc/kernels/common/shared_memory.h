// Allows a kernel more shared memory than the 48 KiB that need no leave.
#pragma once

#include <cuda_runtime.h>

#include <mutex>
#include <set>
#include <shared_mutex>
#include <utility>

namespace spamm::kernels {

constexpr int kMostSharedBytes = 227 * 1024;  // of a thread block on Hopper

// Allows `kernel` this many bytes of dynamic shared memory on the current device, and prefers the
// largest possible shared memory of a multiprocessor, so that thread blocks of other kernels fit
// beside it. Asked of the driver once for each kernel and device, because that takes a microsecond.
inline cudaError_t allow_shared_memory(const void* kernel, int bytes) {
  static std::shared_mutex mutex;
  static std::set<std::pair<const void*, int>> allowed;
  int device = 0;
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  const std::pair key(kernel, device);
  {
    const std::shared_lock reading(mutex);
    if (allowed.contains(key)) return cudaSuccess;
  }
  cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error == cudaSuccess) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                 cudaSharedmemCarveoutMaxShared);
  }
  if (error != cudaSuccess) return error;
  const std::unique_lock writing(mutex);
  allowed.insert(key);
  return cudaSuccess;
}

}  // namespace spamm::kernels
