// The norms of im2col blocks, computed from those of pixels, and what clears a tile counter where
// no norms are computed.
#include "cuda/conv/launch_sm90.h"
#include "kernels/conv/sm90/block_norms.cuh"
#include "kernels/conv/sm90/clear_counter.cuh"

namespace spamm::cuda {

cudaError_t launch_block_norms(const kernels::conv::sm90::BlockNormsParams& params,
                               cudaStream_t stream) {
  return kernels::conv::sm90::launch_block_norms(params, stream);
}

cudaError_t launch_clear_counter(int* counter, cudaStream_t stream) {
  return kernels::conv::sm90::launch_clear_counter(counter, stream);
}

}  // namespace spamm::cuda
