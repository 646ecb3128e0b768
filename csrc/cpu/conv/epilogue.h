// Writes pixels of the output: activation(sums + bias + residual), rounded once.
#pragma once

#include <cstdint>

#include "activation.h"
#include "cpu/common/clones.h"
#include "cpu/common/convert.h"
#include "cpu/conv/activate.h"

namespace spamm::cpu {

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

// `activation` is any but SiLU, whose exponential function does not vectorise. Out: T or Sum.
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
