// float32 convolution on Hopper's tensor cores, rounded to TF32, float32 sums.
#include "cuda/conv/launch_sm90.h"
#include "cuda/tiles.h"
#include "kernels/conv/sm90/launch.cuh"

namespace spamm::cuda {

template <>
cudaError_t launch_conv<float>(const kernels::conv::sm90::ConvParams& params, const void* input,
                               const void* weight, const kernels::Launch& how) {
  return kernels::conv::sm90::convolve<float, kTilesOf<ConvKernel::kSm90Tf32>>(params, input,
                                                                               weight, how);
}

}  // namespace spamm::cuda
