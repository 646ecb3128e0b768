// Starts the norm kernel.
#pragma once

#include <c10/core/ScalarType.h>

#include "cuda/device.h"
#include "kernels/norm_map/params.h"

namespace spamm::cuda {

// Serves `count` matrices, one or two, in one launch. `dtype` is one of those that have norms of
// type Norm; each map holds 1 to 2^31 - 1 blocks. `zeroed`, where it is not null, is set to 0: an
// int in device memory.
template <class Norm>
void launch_norm_maps(const kernels::NormMapParams<Norm>* params, int count, c10::ScalarType dtype,
                      int* zeroed, const OnDevice& device);

}  // namespace spamm::cuda
