// bfloat16 convolution on Hopper's tensor cores, float32 sums.
#include "cuda/conv/launch_sm90.h"
#include "cuda/tiles.h"
#include "kernels/conv/sm90/launch.cuh"

namespace spamm::cuda {

template <>
cudaError_t launch_conv<__nv_bfloat16>(const kernels::conv::sm90::ConvParams& params,
                                       const void* input, const void* weight,
                                       const kernels::Launch& how) {
  return kernels::conv::sm90::convolve<__nv_bfloat16, kTilesOf<ConvKernel::kSm90Bf16>>(
      params, input, weight, how);
}

}  // namespace spamm::cuda
