// From knob to threshold: the step shared by the matrix and the convolution pipelines.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace spamm {

// The 0-d threshold that the one given knob asks for (the caller has checked the knobs).
// `skip_norm_b` decides what is skipped where it differs from `norm_b`, the map that measures
// errors.
at::Tensor threshold_from_knob(const at::Tensor& norm_a, const at::Tensor& norm_b,
                               const std::optional<at::Tensor>& tau,
                               std::optional<double> valid_ratio, std::optional<double> max_error,
                               const std::optional<at::Tensor>& skip_norm_b = std::nullopt);

}  // namespace spamm
