#include "conv/epilogue.h"

#include <ATen/Functions.h>

namespace spamm {
namespace {

void activate_(at::Tensor output, Activation activation) {
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

void apply_epilogue_(const at::Tensor& output, const std::optional<at::Tensor>& residual,
                     Activation activation) {
  if (residual) output.add_(*residual);
  activate_(output, activation);
}

}  // namespace spamm
