// float32 convolution on Hopper's tensor cores: three products of split parts.
#include <c10/cuda/CUDAException.h>

#include "cuda/conv/launch_sm90.h"
#include "kernels/conv/sm90/launch_split.cuh"

namespace spamm::cuda {

void launch_conv_f32x3(const kernels::conv::ConvParams& params, int multiprocessors,
                       cudaStream_t stream) {
  C10_CUDA_CHECK(kernels::conv::split_conv2d(params, multiprocessors, stream));
}

}  // namespace spamm::cuda
