// Launches the norm kernel.
#pragma once

#include <c10/core/ScalarType.h>

#include "cuda/device.h"
#include "kernels/norm_map/params.h"

namespace spamm::cuda {

// Computes the maps of one or two matrices (`count`) in one launch. `dtype` is an operand type
// whose norms are of type Norm. Each map has 1 to 2^31 - 1 blocks. `zeroed`, if not null, is an int
// in device memory that the kernel sets to 0.
template <class Norm>
void launch_norm_maps(const kernels::NormMapParams<Norm>* params, int count, c10::ScalarType dtype,
                      int* zeroed, const OnDevice& device);

}  // namespace spamm::cuda
