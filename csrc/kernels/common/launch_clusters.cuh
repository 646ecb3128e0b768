// Starts a kernel whose thread blocks form clusters. It may overlap the previous kernel of its
// stream, as with launch.cuh.
#pragma once

#include "kernels/common/launch.cuh"

namespace spamm::kernels {

// Launches on `stream`, in clusters of `cluster` thread blocks each.
template <class... Params>
cudaError_t launch_clusters(void (*kernel)(Params...), unsigned blocks, unsigned cluster,
                            int threads, int shared_bytes, cudaStream_t stream,
                            const std::type_identity_t<Params>&... params) {
  bool overlaps = false;
  const cudaError_t error = find_waits(reinterpret_cast<const void*>(kernel), overlaps);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {cluster, 1, 1};
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = overlaps;
  cudaLaunchConfig_t config{};
  config.gridDim = blocks;
  config.blockDim = threads;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = 2;
  return cudaLaunchKernelEx(&config, kernel, params...);
}

}  // namespace spamm::kernels
