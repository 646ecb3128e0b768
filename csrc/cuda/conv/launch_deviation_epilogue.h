// Launches the epilogue of deviations as a pass of its own. `stream` is the current stream. The
// result is the launch's error code.
#pragma once

#include <cuda_runtime.h>

#include "kernels/conv/deviation_epilogue_params.h"

namespace spamm::cuda {

template <class Element>
cudaError_t launch_deviation_epilogue(const kernels::DeviationEpilogueParams& params,
                                      int multiprocessors, cudaStream_t stream);

}  // namespace spamm::cuda
