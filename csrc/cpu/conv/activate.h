// The activations, as functions of one number that vectorise in the loops they are called in.
#pragma once

#include "activation.h"

namespace spamm::cpu {

// Calls fill(activate). `activation` is any but SiLU, whose exponential function does not
// vectorise. Always inlined: `fill` is to be compiled for the instructions of its caller.
template <class Sum, class Fill>
[[gnu::always_inline]] inline void with_activation(Activation activation, const Fill& fill) {
  // NaN stays NaN in all of them.
  const auto at_least_0 = [](Sum x) { return x < 0 ? Sum(0) : x; };
  const auto from_0_to_6 = [](Sum x) { return x < 0 ? Sum(0) : x > 6 ? Sum(6) : x; };
  switch (activation) {
    case Activation::kRelu:
      fill(at_least_0);
      return;
    case Activation::kRelu6:
      fill(from_0_to_6);
      return;
    case Activation::kHardswish:
      fill([&](Sum x) { return x * from_0_to_6(x + 3) / 6; });
      return;
    case Activation::kLeakyRelu:
      fill([](Sum x) { return x < 0 ? x * static_cast<Sum>(kLeakySlope) : x; });
      return;
    default:
      fill([](Sum x) { return x; });
  }
}

}  // namespace spamm::cpu
