// Starts a kernel that may overlap the one before it (overlap.cuh).
#pragma once

#include <cuda_runtime.h>

#include <type_traits>

namespace spamm::kernels {

// Launches on `stream`, and, with `overlap_previous`, while the kernel before on the stream ends:
// what is launched waits for it before it reads.
template <class... Params>
cudaError_t launch(void (*kernel)(Params...), dim3 grid, int threads, int shared_bytes,
                   bool overlap_previous, cudaStream_t stream,
                   const std::type_identity_t<Params>&... params) {
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = threads;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = overlap_previous;
  return cudaLaunchKernelEx(&config, kernel, params...);
}

}  // namespace spamm::kernels
