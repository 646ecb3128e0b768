// Convolution of deviations of float32, multiplied as TF32 on Hopper's tensor cores.
#include "cuda/conv/launch_sm90.h"
#include "cuda/tiles.h"
#include "kernels/conv/sm90/launch.cuh"

namespace spamm::cuda {

template <>
cudaError_t launch_deviation_conv<float>(const kernels::conv::sm90::ConvParams& params,
                                         const void* input, const void* weight,
                                         const kernels::Launch& how) {
  return kernels::conv::sm90::convolve_deviations<float, kTilesOf<ConvKernel::kSm90Tf32>>(
      params, input, weight, how);
}

}  // namespace spamm::cuda
