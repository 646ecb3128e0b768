// The names of a device's multiply kernels, as backend_for reports them.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <string>

#include "backends.h"
#include "checks.h"

namespace spamm {

struct NamedKernels {
  std::string (*name)(at::Device device, at::ScalarType dtype, const Block& block);
};

}  // namespace spamm
