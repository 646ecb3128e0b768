// Starts the kernel that makes block norms of pixel norms.
#pragma once

#include "kernels/conv/sm90/block_norms.cuh"
#include "kernels/conv/sm90/launch.cuh"

namespace spamm::kernels::conv {

inline cudaError_t block_norms(const BlockNormsParams& p, bool overlap_previous,
                               cudaStream_t stream) {
  void (*const kernel)(BlockNormsParams) = block_norms;
  const int64_t norms = static_cast<int64_t>(p.blocks.images) * p.blocks.rows * p.blocks.columns *
                        p.shape.kernel.rows * p.shape.kernel.columns * p.groups;
  return launch(kernel, (norms - 1) / kNormThreads + 1, kNormThreads, 0, overlap_previous, stream,
                p);
}

}  // namespace spamm::kernels::conv
