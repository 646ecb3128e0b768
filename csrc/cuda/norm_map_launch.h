// Starts the norm kernel.
#pragma once

#include <c10/core/ScalarType.h>
#include <cuda_runtime.h>

#include "kernels/norm_map_params.h"

namespace spamm::cuda {

// `vector`: address and strides allow loads of 16 bytes along the lines. `dtype` is one of those
// that have norms of type Norm; the map holds at most 2^31 - 1 blocks.
template <class Norm>
void launch_norm_map(const kernels::NormMapParams<Norm>& params, c10::ScalarType dtype, bool vector,
                     cudaStream_t stream);

}  // namespace spamm::cuda
