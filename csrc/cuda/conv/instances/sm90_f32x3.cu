// float32 convolution on Hopper's tensor cores: three products of split parts.
#include "cuda/conv/launch_sm90.h"
#include "cuda/tiles.h"
#include "kernels/conv/sm90/launch_split.cuh"

namespace spamm::cuda {

cudaError_t launch_conv_f32x3(const kernels::conv::sm90::ConvParams& params,
                              const kernels::Launch& how) {
  return kernels::conv::sm90::convolve_split<kTilesOf<ConvKernel::kSm90F32x3>>(params, how);
}

}  // namespace spamm::cuda
