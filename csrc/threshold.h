// From knob to threshold. Matrix products and convolutions share this step.
#pragma once

#include <ATen/ScalarOps.h>
#include <ATen/core/Tensor.h>

#include <optional>

#include "arguments.h"
#include "checks.h"

namespace spamm {

// The number in a 0-d CPU tensor. Reads a float64 directly: item() goes through the dispatcher.
inline double host_scalar(const at::Tensor& tau) {
  return tau.scalar_type() == at::kDouble ? *tau.const_data_ptr<double>() : tau.item<double>();
}

// Tells whether the host knows that nothing is skipped: tau is on the CPU and not above 0 (or NaN).
inline bool skips_nothing(const at::Tensor& tau) { return tau.is_cpu() && !(host_scalar(tau) > 0); }
inline bool skips_nothing(const Knob& knob) {
  return knob.threshold ? !(*knob.threshold > 0) : knob.tau && skips_nothing(*knob.tau);
}

inline void check_find_tau(const FindTauArguments& x) {
  check_norm_maps(x.norm_a, x.norm_b);
  check_skip_norm_map(x.skip_norm_b, x.norm_b);
  check_search(x);
  const auto products = static_cast<double>(x.norm_a.numel() * x.norm_b.size(-1));
  if (x.valid_ratio && products > 0 && *x.valid_ratio * products < 0.5) {
    TORCH_WARN_ONCE("valid_ratio ", *x.valid_ratio, " of ", products,
                    " block products is nearest to none of them: all are skipped (", 0.5 / products,
                    " and more keep one)");
  }
}

// The 0-d threshold for a knob that has been checked. `skip_norm_b`: see error_bound.
inline at::Tensor threshold_from_knob(const at::Tensor& norm_a, const at::Tensor& norm_b,
                                      const Knob& knob,
                                      const std::optional<at::Tensor>& skip_norm_b = std::nullopt) {
  if (knob.tau) return *knob.tau;
  if (knob.threshold) return c10::scalar_to_tensor(*knob.threshold);  // float64 on the CPU
  if (knob.valid_ratio) return find_tau(norm_a, skip_norm_b.value_or(norm_b), *knob.valid_ratio);
  return find_tau_for_error(norm_a, norm_b, *knob.max_error, skip_norm_b);
}

}  // namespace spamm
