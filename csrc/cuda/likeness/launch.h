// Launches the kernel that orders images, on the current device. The stream is the current stream.
// The result is the launch's error code.
#pragma once

#include <cuda_runtime.h>

#include "kernels/likeness/params.h"

namespace spamm::cuda {

template <class T>
cudaError_t launch_image_order(const kernels::likeness::OrderParams& params, int multiprocessors,
                               cudaStream_t stream);

}  // namespace spamm::cuda
