// The split of float32 operands into halves.
#include <c10/cuda/CUDAException.h>

#include "kernels/split_launch.cuh"
#include "multiply_launch.h"

namespace spamm::cuda {

void launch_split(const kernels::SplitParams* params, int count, int halves, cudaStream_t stream) {
  const auto launch = halves == 1 ? kernels::launch_split<1> : kernels::launch_split<2>;
  C10_CUDA_CHECK(launch(params, count, stream));
}

}  // namespace spamm::cuda
