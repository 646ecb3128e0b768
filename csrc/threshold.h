// From knob to threshold. Matrix products and convolutions share this step.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "spamm/spamm.h"

namespace spamm {

// The 0-d threshold for a knob that has been checked. `skip_norm_b`: see error_bound.
at::Tensor threshold_from_knob(const at::Tensor& norm_a, const at::Tensor& norm_b, const Knob& knob,
                               const std::optional<at::Tensor>& skip_norm_b = std::nullopt);

}  // namespace spamm
