// The kernels' names, as backend_for reports them.
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
}

}  // namespace spamm
