// Launches the kernel that concatenates deviations, one instance for each type.
#pragma once

#include <cuda_runtime.h>

#include "kernels/conv/sm90/join_deviations_params.h"

namespace spamm::cuda {

template <class Element>
cudaError_t launch_join_deviations(const kernels::conv::sm90::JoinParams& params,
                                   cudaStream_t stream);

}  // namespace spamm::cuda
