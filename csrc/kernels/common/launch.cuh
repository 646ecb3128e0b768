// Starts a kernel that may overlap the one before it (overlap.cuh).
#pragma once

#include <cuda_runtime.h>

#include <map>
#include <mutex>
#include <shared_mutex>
#include <type_traits>
#include <utility>

namespace spamm::kernels {

// Sets `waits` to whether the code of `kernel` that the current device runs holds the waits of
// overlap.cuh. The chip does not tell: one above 9.0 may run PTX of compute_80, which holds none.
// Asked once for each kernel and device.
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

// Launches on `stream`, and, with `overlap_previous`, while the kernel before on the stream ends,
// if the kernel's code waits for it before it reads.
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
