// The whole of SpAMM, stage by stage.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace spamm {

// spamm_torch::spamm by the stages' own ops; devices that join stages fall back on it.
at::Tensor spamm_by_stages(const at::Tensor& a, const at::Tensor& b,
                           const std::optional<at::Tensor>& tau, std::optional<double> valid_ratio,
                           std::optional<double> max_error, at::IntArrayRef block,
                           const std::optional<at::Tensor>& norm_a,
                           const std::optional<at::Tensor>& norm_b,
                           const std::optional<at::Tensor>& input, const at::Scalar& beta,
                           const at::Scalar& alpha);

}  // namespace spamm
