// The whole of SpAMM as one op: norm map -> threshold -> multiply. Device-free: every stage is
// dispatched on its own.
#include <torch/library.h>

#include "checks.h"
#include "spamm/spamm.h"
#include "threshold.h"

namespace spamm {
namespace {

Tensor spamm_op(const Tensor& a, const Tensor& b, const std::optional<Tensor>& tau,
                std::optional<double> valid_ratio, std::optional<double> max_error,
                IntArrayRef block, const std::optional<Tensor>& norm_a,
                const std::optional<Tensor>& norm_b, const std::optional<Tensor>& input,
                const Scalar& beta, const Scalar& alpha) {
  check_operands(a, b);
  check_knobs(tau, valid_ratio, max_error);
  const auto [m, k, n] = check_block(block);
  const Tensor map_a = norm_a ? *norm_a : norm_map(a, {m, k});
  const Tensor map_b = norm_b ? *norm_b : norm_map(b, {k, n});
  const Tensor threshold = threshold_from_knob(map_a, map_b, tau, valid_ratio, max_error);
  return multiply(a, b, map_a, map_b, threshold, block, input, beta, alpha);
}

}  // namespace

TORCH_LIBRARY_IMPL(spamm_torch, CompositeExplicitAutograd, m) { m.impl("spamm", &spamm_op); }

}  // namespace spamm
