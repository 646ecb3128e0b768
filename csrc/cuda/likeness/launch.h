// Launches of the kernels that order images. The stream is the current stream. The result is the
// launch's error code.
#pragma once

#include <cuda_runtime.h>

#include "kernels/likeness/params.h"

namespace spamm::cuda {

template <class T>
cudaError_t launch_image_centres(const kernels::likeness::CentreParams& params,
                                 cudaStream_t stream);

cudaError_t launch_image_order(const kernels::likeness::OrderParams& params, cudaStream_t stream);

}  // namespace spamm::cuda
