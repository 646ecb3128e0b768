// Splits float32 operands into split parts.
#include "cuda/multiply/launch.h"
#include "kernels/norm_map/split.cuh"

namespace spamm::cuda {

cudaError_t launch_split(const kernels::SplitParams* params, int count, int split_parts,
                         int granules, cudaStream_t stream) {
  return kernels::launch_split(params, count, split_parts, granules, stream);
}

}  // namespace spamm::cuda
