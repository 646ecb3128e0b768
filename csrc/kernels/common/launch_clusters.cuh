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
  cudaLaunchAttribute clusters{};
  clusters.id = cudaLaunchAttributeClusterDimension;
  clusters.val.clusterDim = {cluster, 1, 1};
  return launch_with(&clusters, kernel, blocks, threads, shared_bytes, /*overlap_previous=*/true,
                     stream, params...);
}

}  // namespace spamm::kernels
