// The whole of SpAMM, stage by stage.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "spamm/spamm.h"

namespace spamm {

// The arguments of spamm_torch::spamm: beta * input + alpha * (a @ b).
struct SpammArguments {
  const Tensor &a, &b;
  Knob knob;
  IntArrayRef block;
  const std::optional<Tensor>&norm_a, &norm_b;  // computed where absent
  const std::optional<Tensor>& input;
  const Scalar &beta, &alpha;
};

// By the stages' own ops; devices that join stages fall back on it. Checks nothing itself.
Tensor spamm_by_stages(const SpammArguments& arguments);

}  // namespace spamm
