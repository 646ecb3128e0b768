// Starts the pass that takes the norms of an im2col matrix that is not in memory.
#pragma once

#include <c10/core/ScalarType.h>
#include <cuda_runtime.h>

#include "kernels/conv/sm80/params.h"

namespace spamm::cuda {

// `dtype` is one of those that have norms of type Norm; there are 1 to 2^31 - 1 norms. `stream` is
// the current one.
template <class Norm>
void launch_im2col_norms(const kernels::Im2colNormsParams<Norm>& params, c10::ScalarType dtype,
                         cudaStream_t stream);

}  // namespace spamm::cuda
