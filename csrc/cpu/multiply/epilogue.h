// Writes C = alpha * sums + beta * input, rounded once.
#pragma once

#include <cstdint>

#include "cpu/common/clones.h"
#include "cpu/common/convert.h"
#include "cpu/multiply/panels.h"

namespace spamm::cpu {

// Writes some rows and columns of C. `sums` is null if no product was valid; `input` may be null,
// or the very elements that are written.
template <class T, class Sum>
SPAMM_CPU_CLONES static void write_rows(const Sum* __restrict sums, int64_t ld_sums, Sum alpha,
                                        const View<T>* input, Sum beta, T* out, int64_t ld_out,
                                        int64_t rows, int64_t columns) {
  const auto fill = [&](const auto& element) {
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t c = 0; c < columns; ++c) out[r * ld_out + c] = narrow<T>(element(r, c));
  };
  const auto product = [&](int64_t r, int64_t c) { return alpha * sums[r * ld_sums + c]; };
  const auto addend = [&](int64_t r, int64_t c) {
    const T value = input->data[r * input->row_stride + c * input->column_stride];
    return beta * static_cast<Sum>(widen(value));
  };
  if (sums && input) {
    fill([&](int64_t r, int64_t c) { return product(r, c) + addend(r, c); });
  } else if (sums) {
    fill(product);
  } else if (input) {
    fill(addend);
  } else {
    fill([](int64_t, int64_t) { return Sum(0); });
  }
}

}  // namespace spamm::cpu
