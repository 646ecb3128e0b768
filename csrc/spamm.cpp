// SpAMM as one op: norm map -> threshold -> multiply. Device-free, because each stage is an op that
// is dispatched by itself.
#include "spamm.h"

#include <torch/library.h>

#include <tuple>

#include "checks.h"
#include "ops.h"
#include "shards/spamm_devices.h"
#include "spamm/spamm.h"
#include "threshold.h"

namespace spamm {

std::tuple<Tensor, Tensor> norm_maps_of(const SpammArguments& arguments) {
  const auto& [a, b, knob, block, norm_a, norm_b, input, beta, alpha] = arguments;
  const auto [m, k, n] = check_block(block);
  if (!norm_a && !norm_b) return ops::norm_maps(a, b, block);
  return {norm_a ? *norm_a : norm_map(a, {m, k}), norm_b ? *norm_b : norm_map(b, {k, n})};
}

Tensor spamm_by_stages(const SpammArguments& arguments) {
  const auto& [a, b, knob, block, norm_a, norm_b, input, beta, alpha] = arguments;
  const auto [map_a, map_b] = norm_maps_of(arguments);
  const Tensor threshold = threshold_from_knob(map_a, map_b, knob);
  return multiply(a, b, map_a, map_b, threshold, block, input, beta, alpha);
}

namespace {

// The maps of both operands, one after the other. CUDA computes both in one launch instead.
std::tuple<Tensor, Tensor> norm_maps_op(const Tensor& a, const Tensor& b, IntArrayRef block) {
  const auto [m, k, n] = check_block(block);
  check_matrix_pair(a, b);
  return {norm_map(a, {m, k}), norm_map(b, {k, n})};
}

Tensor spamm_op(const Tensor& a, const Tensor& b, const std::optional<Tensor>& tau,
                std::optional<double> threshold, std::optional<double> valid_ratio,
                std::optional<double> max_error, IntArrayRef block,
                const std::optional<Tensor>& norm_a, const std::optional<Tensor>& norm_b,
                const std::optional<Tensor>& input, const Scalar& beta, const Scalar& alpha,
                at::OptionalIntArrayRef devices) {
  const Knob knob = checked_knob({tau, threshold, valid_ratio, max_error});
  check_operands(a, b);
  const SpammArguments arguments{a, b, knob, block, norm_a, norm_b, input, beta, alpha};
  return devices ? shards::spamm_on_devices(arguments, *devices) : spamm_by_stages(arguments);
}

}  // namespace

TORCH_LIBRARY_IMPL(spamm_torch, CompositeExplicitAutograd, m) {
  m.impl("norm_maps", &norm_maps_op);
  m.impl("spamm", &spamm_op);
}

}  // namespace spamm
