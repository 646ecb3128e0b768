// Writes pixels of the output: activation(sums + bias + residual), rounded once.
#pragma once

#include <c10/util/Exception.h>

#include <cstdint>

#include "activation.h"
#include "cpu/common/convert.h"
#include "cpu/common/machine.h"

namespace spamm::cpu {

// Calls fill(activate), for an activation that vectorises. Always inlined: `fill` is to be compiled
// for the instructions of its caller.
template <class Sum, class Fill>
[[gnu::always_inline]] inline void with_activation(Activation activation, const Fill& fill) {
  // NaN stays NaN in all of them.
  const auto at_least_0 = [](Sum x) { return x < 0 ? Sum(0) : x; };
  const auto from_0_to_6 = [](Sum x) { return x < 0 ? Sum(0) : x > 6 ? Sum(6) : x; };
  switch (activation) {
    case Activation::kNone:
      fill([](Sum x) { return x; });
      return;
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
    case Activation::kSilu:
      break;
  }
  TORCH_INTERNAL_ASSERT(false, facts_of(activation).name, " does not vectorise");
}

// `rows` pixels of `columns` channels. Pixels of the sums are ld_sums apart, those of the residual
// ld_residual.
template <class T, class Sum>
struct PixelSums {
  const Sum* sums;
  int64_t ld_sums;
  const Sum* bias;
  const T* residual;  // null if there is none
  int64_t ld_residual, rows, columns;
};

// `activation` is one that vectorises. Out: T or Sum.
template <class Out, class T, class Sum>
SPAMM_CPU_CLONES static void write_pixels(const PixelSums<T, Sum>& pixels, Activation activation,
                                          Out* __restrict out, int64_t ld_out) {
  const auto [sums, ld_sums, bias, residual, ld_residual, rows, columns] = pixels;
  const auto fill = [&](const auto& activate) {
    for (int64_t r = 0; r < rows; ++r) {
      const Sum* __restrict sum = sums + r * ld_sums;
      Out* __restrict to = out + r * ld_out;
      if (residual) {
        const T* __restrict add = residual + r * ld_residual;
        for (int64_t c = 0; c < columns; ++c)
          to[c] = narrow<Out>(activate(sum[c] + bias[c] + static_cast<Sum>(widen(add[c]))));
      } else {
        for (int64_t c = 0; c < columns; ++c) to[c] = narrow<Out>(activate(sum[c] + bias[c]));
      }
    }
  };
  with_activation<Sum>(activation, fill);
}

}  // namespace spamm::cpu
