// The kernels' names, as backend_for reports them, and the setting that they depend on.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <string>

#include "checks.h"

namespace spamm {

namespace cpu {
std::string backend_name(at::ScalarType dtype, const Block& block);
}

namespace cuda {
std::string backend_name(at::Device device, at::ScalarType dtype, const Block& block);

// Whether float32 may be rounded to TF32, as PyTorch's own matrix products decide it. Another
// thread may change the setting at any time: ask once in each call and pass the answer on.
bool allow_tf32();
}  // namespace cuda

}  // namespace spamm
