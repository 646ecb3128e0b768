// From knob to threshold: the step shared by the matrix and the convolution pipelines.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "spamm/spamm.h"

namespace spamm {

// The 0-d threshold that the knob, already checked, asks for. `skip_norm_b` decides what is skipped
// where it differs from `norm_b`, the map that measures errors.
at::Tensor threshold_from_knob(const at::Tensor& norm_a, const at::Tensor& norm_b, const Knob& knob,
                               const std::optional<at::Tensor>& skip_norm_b = std::nullopt);

}  // namespace spamm
