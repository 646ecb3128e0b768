// Starts a kernel that may overlap the previous kernel of its stream (overlap.cuh).
#pragma once

#include <cuda_runtime.h>

#include <type_traits>

#include "kernels/common/per_kernel.h"

namespace spamm::kernels {

// Sets `waits` to whether the current device runs code of `kernel` that contains the waits of
// overlap.cuh. The compute capability does not answer this: a chip above 9.0 may run PTX of
// compute_80, in which the waits are empty.
inline cudaError_t find_waits(const void* kernel, bool& waits) {
  static PerKernel<bool> known;
  return known.find(kernel, waits, [&](bool& found) {
    cudaFuncAttributes code{};
    const cudaError_t error = cudaFuncGetAttributes(&code, kernel);
    found = code.ptxVersion >= 90;
    return error;
  });
}

// Launches on `stream`. With `overlap_previous` the kernel may start before the previous kernel of
// the stream ends, provided that its code contains the wait. `more`: one more attribute, or null.
template <class... Params>
cudaError_t launch_with(const cudaLaunchAttribute* more, void (*kernel)(Params...), dim3 grid,
                        int threads, size_t shared_bytes, bool overlap_previous,
                        cudaStream_t stream, const std::type_identity_t<Params>&... params) {
  bool overlaps = false;
  if (overlap_previous) {
    const cudaError_t error = find_waits(reinterpret_cast<const void*>(kernel), overlaps);
    if (error != cudaSuccess) return error;
  }
  cudaLaunchAttribute attributes[2] = {};
  unsigned count = 0;
  if (more != nullptr) attributes[count++] = *more;
  if (overlaps) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = threads;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = count;
  return cudaLaunchKernelEx(&config, kernel, params...);
}

template <class... Params>
cudaError_t launch(void (*kernel)(Params...), dim3 grid, int threads, int shared_bytes,
                   bool overlap_previous, cudaStream_t stream,
                   const std::type_identity_t<Params>&... params) {
  return launch_with(nullptr, kernel, grid, threads, shared_bytes, overlap_previous, stream,
                     params...);
}

// The same, overlapping, for thread blocks that meet (meeting.cuh): all of them have to run at the
// same time. The launch fails if the device has no room for that.
template <class... Params>
cudaError_t launch_meeting(void (*kernel)(Params...), unsigned blocks, int threads,
                           size_t shared_bytes, bool meets, cudaStream_t stream,
                           const std::type_identity_t<Params>&... params) {
  cudaLaunchAttribute meeting{};
  meeting.id = cudaLaunchAttributeCooperative;
  meeting.val.cooperative = meets;
  return launch_with(&meeting, kernel, blocks, threads, shared_bytes, /*overlap_previous=*/true,
                     stream, params...);
}

}  // namespace spamm::kernels
