// The launch of Hopper's convolution of deviations, as that of kernels/reference/sm90/launch.cuh.
#pragma once

#include <cuda_runtime.h>

#include "kernels/common/tile.h"
#include "kernels/reference/params.h"

namespace spamm::cuda {

// The caller sets all of `params` but the maps; next_tile, if not null, points to zero.
template <class Element>
cudaError_t launch_deviation_conv(const kernels::reference::DeviationParams& params,
                                  const void* input, const void* weight,
                                  const kernels::Launch& how);

}  // namespace spamm::cuda
