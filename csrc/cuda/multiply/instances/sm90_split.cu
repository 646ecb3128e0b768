// The split of float32 operands into split parts.
#include <c10/cuda/CUDAException.h>

#include "cuda/multiply/launch.h"
#include "kernels/norm_map/split_launch.cuh"

namespace spamm::cuda {

void launch_split(const kernels::SplitParams* params, int count, int split_parts,
                  cudaStream_t stream) {
  const auto launch = split_parts == 1 ? kernels::launch_split<1> : kernels::launch_split<2>;
  C10_CUDA_CHECK(launch(params, count, stream));
}

}  // namespace spamm::cuda
