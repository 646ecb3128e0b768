#include "conv/epilogue.h"

#include <ATen/Functions.h>

namespace spamm {
namespace {

using at::Tensor;

void activate_(Tensor output, Activation activation) {
  switch (activation) {
    case Activation::kNone:
      return;
    case Activation::kRelu:
      output.relu_();
      return;
    case Activation::kRelu6:
      at::hardtanh_(output, 0, 6);
      return;
    case Activation::kHardswish:
      at::hardswish_(output);
      return;
    case Activation::kSilu:
      at::silu_(output);
      return;
    case Activation::kLeakyRelu:
      at::leaky_relu_(output, kLeakySlope);
      return;
  }
}

}  // namespace

void apply_epilogue_(const Tensor& output, const std::optional<Tensor>& residual,
                     Activation activation) {
  if (residual) output.add_(*residual);
  activate_(output, activation);
}

void apply_deviation_epilogue_(const Tensor& output, const std::optional<Tensor>& residual,
                               const Tensor& base, Activation activation) {
  const auto* backend = Backends<DeviationEpilogueBackend>::find(output.device().type(), output,
                                                                 residual, base, activation);
  if (backend != nullptr) {
    backend->run(output, residual, base, activation);
    return;
  }
  if (residual) output.add_(*residual);
  // One for each image: some activations round by where in memory an element lies.
  const Tensor of_reference = at::empty_like(output).copy_(base);
  output.add_(of_reference);
  activate_(output, activation);
  activate_(of_reference, activation);
  output.sub_(of_reference);
}

}  // namespace spamm
