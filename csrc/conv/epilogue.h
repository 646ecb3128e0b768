// The end of a convolution, for backends that do not compute all of it: residual, base, activation.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "activation.h"
#include "backends.h"

namespace spamm {

// Adds the residual, if there is one, and applies the activation, in place. Each step rounds to the
// output's type. ReLU keeps NaN, as torch's does.
void apply_epilogue_(const at::Tensor& output, const std::optional<at::Tensor>& residual,
                     Activation activation);

// The same for deviations: activation(output + residual + base) - activation(base), in place. Base
// has one image. Zero where output and residual are.
void apply_deviation_epilogue_(const at::Tensor& output, const std::optional<at::Tensor>& residual,
                               const at::Tensor& base, Activation activation);

// A device's pass over the output that does all of it.
struct DeviationEpilogueBackend {
  bool (*supports)(const at::Tensor& output, const std::optional<at::Tensor>& residual,
                   const at::Tensor& base, Activation activation);
  void (*run)(const at::Tensor& output, const std::optional<at::Tensor>& residual,
              const at::Tensor& base, Activation activation);
};

}  // namespace spamm
