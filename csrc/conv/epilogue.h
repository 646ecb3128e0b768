// The end of a convolution, for backends that do not compute all of it: residual and activation.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "activation.h"

namespace spamm {

// Adds the residual, if there is one, and applies the activation, in place. Each step rounds to the
// output's type. ReLU keeps NaN, as torch's does.
void apply_epilogue_(const at::Tensor& output, const std::optional<at::Tensor>& residual,
                     Activation activation);

}  // namespace spamm
