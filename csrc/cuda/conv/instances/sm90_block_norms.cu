// The norms of im2col blocks, computed from those of pixels.
#include "cuda/conv/launch_sm90.h"
#include "kernels/conv/sm90/block_norms.cuh"

namespace spamm::cuda {

cudaError_t launch_block_norms(const kernels::conv::sm90::BlockNormsParams& params,
                               cudaStream_t stream) {
  return kernels::conv::sm90::launch_block_norms(params, stream);
}

}  // namespace spamm::cuda
