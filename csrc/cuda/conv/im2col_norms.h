// Launches the norm pass for an im2col matrix that is not in memory.
#pragma once

#include <c10/core/ScalarType.h>
#include <cuda_runtime.h>

#include "kernels/conv/sm80/params.h"

namespace spamm::cuda {

// `dtype` is an operand type whose norms are of type Norm. There are 1 to 2^31 - 1 norms. `stream`
// is the current stream.
template <class Norm>
void launch_im2col_norms(const kernels::Im2colNormsParams<Norm>& params, c10::ScalarType dtype,
                         cudaStream_t stream);

}  // namespace spamm::cuda
