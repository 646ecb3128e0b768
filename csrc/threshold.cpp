// From knob to threshold. Device-free.
#include "threshold.h"

#include <ATen/ScalarOps.h>

namespace spamm {
Tensor threshold_from_knob(const Tensor& norm_a, const Tensor& norm_b, const Knob& knob,
                           const std::optional<Tensor>& skip_norm_b) {
  if (knob.tau) return *knob.tau;
  if (knob.threshold) return c10::scalar_to_tensor(*knob.threshold);  // float64 on the CPU
  if (knob.valid_ratio) return find_tau(norm_a, skip_norm_b.value_or(norm_b), *knob.valid_ratio);
  return find_tau_for_error(norm_a, norm_b, *knob.max_error, skip_norm_b);
}

}  // namespace spamm
