// SpAMM from its stages.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

#include "spamm/spamm.h"

namespace spamm {

// The arguments of spamm_torch::spamm: beta * input + alpha * (a @ b).
struct SpammArguments {
  const Tensor &a, &b;
  Knob knob;
  IntArrayRef block;
  const std::optional<Tensor>&norm_a, &norm_b;  // computed if absent
  const std::optional<Tensor>& input;
  const Scalar &beta, &alpha;
};

// The norm maps of a and b: those that are given, the others computed.
std::tuple<Tensor, Tensor> norm_maps_of(const SpammArguments& arguments);

// Calls one op for each stage. A device that fuses stages falls back on it. The ops check the
// arguments; this function does not.
Tensor spamm_by_stages(const SpammArguments& arguments);

}  // namespace spamm
