// A product of operands on one GPU, computed on several.
#pragma once

#include <ATen/core/Tensor.h>

#include "spamm.h"

namespace spamm::shards {

// The op spamm with `devices`. The result lies where the operands lie. Waits for the device once.
Tensor spamm_on_devices(const SpammArguments& arguments, IntArrayRef devices);

}  // namespace spamm::shards
