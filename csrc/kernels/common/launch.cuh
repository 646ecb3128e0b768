// Starts a kernel that may overlap the previous kernel of its stream (overlap.cuh).
#pragma once

#include <cuda_runtime.h>

#include <map>
#include <mutex>
#include <shared_mutex>
#include <type_traits>
#include <utility>

namespace spamm::kernels {

// Sets `waits` to whether the current device runs code of `kernel` that contains the waits of
// overlap.cuh. The compute capability does not answer this: a chip above 9.0 may run PTX of
// compute_80, in which the waits are empty. The answer is cached for each kernel and device.
inline cudaError_t find_waits(const void* kernel, bool& waits) {
  static std::shared_mutex mutex;
  static std::map<std::pair<const void*, int>, bool> known;
  int device = 0;
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  const std::pair key(kernel, device);
  {
    const std::shared_lock reading(mutex);
    if (const auto found = known.find(key); found != known.end()) {
      waits = found->second;
      return cudaSuccess;
    }
  }
  cudaFuncAttributes code{};
  if (const cudaError_t error = cudaFuncGetAttributes(&code, kernel); error != cudaSuccess) {
    return error;
  }
  waits = code.ptxVersion >= 90;
  const std::unique_lock writing(mutex);
  known.emplace(key, waits);
  return cudaSuccess;
}

// Launches on `stream`. With `overlap_previous` the kernel may start before the previous kernel of
// the stream ends, provided that its code contains the wait.
template <class... Params>
cudaError_t launch(void (*kernel)(Params...), dim3 grid, int threads, int shared_bytes,
                   bool overlap_previous, cudaStream_t stream,
                   const std::type_identity_t<Params>&... params) {
  bool overlaps = false;
  if (overlap_previous) {
    const cudaError_t error = find_waits(reinterpret_cast<const void*>(kernel), overlaps);
    if (error != cudaSuccess) return error;
  }
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = threads;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = overlaps;
  return cudaLaunchKernelEx(&config, kernel, params...);
}

}  // namespace spamm::kernels
