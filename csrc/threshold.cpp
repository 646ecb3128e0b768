// From knob to threshold, and the valid ratio. Device-free.
#include "threshold.h"

#include <ATen/Functions.h>
#include <torch/library.h>

namespace spamm {
namespace {

// The share of valid block products. The counts are exact, so only the division rounds.
Tensor valid_ratio_op(const Tensor& norm_a, const Tensor& norm_b, const Tensor& tau) {
  check_norm_maps(norm_a, norm_b);
  const int64_t products = norm_a.numel() * norm_b.size(-1);
  if (products == 0) return at::ones({}, norm_a.options());
  const Tensor valid = valid_counts(norm_a, norm_b, tau).sum(at::kLong).to(at::kDouble);
  // Divides by a tensor, because CUDA divides by a number as a multiplication by its rounded
  // inverse.
  return valid.div(at::full({}, products, valid.options())).to(norm_a.scalar_type());
}

}  // namespace

Tensor threshold_from_knob(const Tensor& norm_a, const Tensor& norm_b, const Knob& knob,
                           const std::optional<Tensor>& skip_norm_b) {
  if (knob.tau) return *knob.tau;
  if (knob.valid_ratio) return find_tau(norm_a, skip_norm_b.value_or(norm_b), *knob.valid_ratio);
  return find_tau_for_error(norm_a, norm_b, *knob.max_error, skip_norm_b);
}

TORCH_LIBRARY_IMPL(spamm_torch, CompositeExplicitAutograd, m) {
  m.impl("valid_ratio", &valid_ratio_op);
}

}  // namespace spamm
