// bfloat16 convolution with max pooling on Hopper's tensor cores, float32 sums.
#include "cuda/conv/launch_conv_pool_sm90.h"
#include "cuda/tiles.h"
#include "kernels/conv/sm90/launch.cuh"

namespace spamm::cuda {

template <>
cudaError_t launch_conv_pool<__nv_bfloat16>(const kernels::conv::sm90::ConvParams& params,
                                            const void* input, const void* weight,
                                            const kernels::Launch& how) {
  return kernels::conv::sm90::convolve_and_pool<__nv_bfloat16, kTilesOf<ConvKernel::kSm90Bf16>>(
      params, input, weight, how);
}

}  // namespace spamm::cuda
