// SpAMM from its stages.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

#include "block.h"
#include "spamm/spamm.h"

namespace spamm {

// The arguments of spamm_torch::spamm but for `devices`: beta * input + alpha * (a @ b).
struct SpammArguments {
  const Tensor &a, &b;
  Knob knob;
  IntArrayRef block;
  const std::optional<Tensor>&norm_a, &norm_b;  // computed if absent
  const std::optional<Tensor>& input;
  const Scalar &beta, &alpha;
  bool symmetric = false;  // the upper triangle and its mirror image
};

// Whether the norm map of `a` is also that of `b`: they are one matrix, cut alike.
bool share_norm_map(const Tensor& a, const Tensor& b, const Block& block);

// The norm maps of a and b: those that are given, the others computed. They may be one tensor.
std::tuple<Tensor, Tensor> norm_maps_of(const SpammArguments& arguments);

// Uninitialised memory for the result of the product, and for the norm map of a result.
Tensor empty_result(const SpammArguments& arguments);
Tensor empty_map_of_result(const Tensor& c, const Block& block);

// As spamm_by_stages() below. Writes the result to `out`, and its norm map to `norms` if that is
// given.
void spamm_into_by_stages(const SpammArguments& arguments, const Tensor& out,
                          const std::optional<Tensor>& norms);

// Calls one op for each stage. A device that fuses stages falls back on it. The ops check the
// arguments; this function does not.
Tensor spamm_by_stages(const SpammArguments& arguments);

// Replaces the lower triangle of each matrix in `c` by the mirror image of the upper one.
void mirror_upper(const Tensor& c);

}  // namespace spamm
