// Starts the kernel that tells which units of B are needed.
#include <c10/cuda/CUDAException.h>

#include "cuda/threshold/launch.h"
#include "kernels/threshold/needed_units.cuh"

namespace spamm::cuda {

template <class Norm>
void launch_needed_units(const kernels::UnitParams<Norm>& params, cudaStream_t stream) {
  const int64_t blocks = (params.stages - 1) / kernels::kBlockStages + 1;
  const dim3 grid(static_cast<unsigned>(params.kb), static_cast<unsigned>(blocks));
  kernels::needed_units<<<grid, kernels::kUnitThreads, 0, stream>>>(params);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

template void launch_needed_units(const kernels::UnitParams<float>&, cudaStream_t);
template void launch_needed_units(const kernels::UnitParams<double>&, cudaStream_t);

}  // namespace spamm::cuda
