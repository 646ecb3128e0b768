// A product of operands on one GPU or in host memory, computed on several GPUs.
#pragma once

#include <ATen/core/Tensor.h>

#include "spamm.h"

namespace spamm::shards {

// Whether the device on which the operands lie is among `devices` and computes the product alone,
// because to share it would take longer. The bits are the same.
bool is_for_one(const ProductArguments& product);

// The op spamm with `devices`. The result lies where the operands lie: in pinned memory for
// operands in host memory, and then complete on return. For operands on a GPU the host waits for it
// once, to read the plan.
Tensor spamm_on_devices(const ProductArguments& product);

}  // namespace spamm::shards
