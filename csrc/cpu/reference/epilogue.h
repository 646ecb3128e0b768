// Writes pixels of deviations from a reference: activation(sums + residual + base) -
// activation(base), rounded once.
#pragma once

#include <cstdint>

#include "activation.h"
#include "cpu/common/convert.h"
#include "cpu/common/machine.h"
#include "cpu/conv/epilogue.h"

namespace spamm::cpu {

// `rows` pixels of `columns` channels; those of `sums`, for one, are ld_sums apart.
template <class In, class T>
struct PixelDeviations {
  const In* sums;
  int64_t ld_sums;
  const T* base;
  int64_t ld_base;
  const T* residual;  // null if there is none
  int64_t ld_residual, rows, columns;
};

// SiLU is left to ATen, because its exponential function does not vectorise.
inline bool writes_deviations(Activation activation) { return activation != Activation::kSilu; }

// `out` may be the sums.
template <class In, class T, class Sum>
SPAMM_CPU_CLONES static void write_deviations(const PixelDeviations<In, T>& pixels,
                                              Activation activation, T* out, int64_t ld_out) {
  const auto [sums, ld_sums, base, ld_base, residual, ld_residual, rows, columns] = pixels;
  const auto fill = [&](const auto& activate) {
    for (int64_t r = 0; r < rows; ++r) {
      const In* sum = sums + r * ld_sums;
      const T* from = base + r * ld_base;
      const T* add = residual ? residual + r * ld_residual : nullptr;
      T* to = out + r * ld_out;
      if (add) {
#pragma GCC ivdep
        for (int64_t c = 0; c < columns; ++c) {
          const Sum b = widen(from[c]), s = widen(sum[c]);
          to[c] = narrow<T>(activate(s + static_cast<Sum>(widen(add[c])) + b) - activate(b));
        }
      } else {
#pragma GCC ivdep
        for (int64_t c = 0; c < columns; ++c) {
          const Sum b = widen(from[c]), s = widen(sum[c]);
          to[c] = narrow<T>(activate(s + b) - activate(b));
        }
      }
    }
  };
  with_activation<Sum>(activation, fill);
}

}  // namespace spamm::cpu
