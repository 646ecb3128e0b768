// Launches the Hopper convolution with ReLU and max pooling (kernels/conv/sm90/pool_windows.cuh),
// for half types. As launch_conv() of launch_sm90.h otherwise.
#pragma once

#include <cuda_runtime.h>

#include "kernels/common/tile.h"
#include "kernels/conv/sm90/params.h"

namespace spamm::cuda {

template <class Element>
cudaError_t launch_conv_pool(const kernels::conv::sm90::ConvParams& params, const void* input,
                             const void* weight, const kernels::Launch& how);

}  // namespace spamm::cuda
