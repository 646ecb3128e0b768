// From sums to the elements of C: alpha * sums + beta * input, rounded once.
#pragma once

#include <cstdint>

#include "cpu/clones.h"
#include "cpu/convert.h"
#include "cpu/panels.h"

namespace spamm::cpu {

constexpr int64_t kMaxBlockEdge = 128;

// Writes one block of C, as large as `input` where there is one. Without sums (no valid product) the
// block is beta * input; without input it is alpha * sums.
template <class T, class Sum>
SPAMM_CPU_CLONES static void write_block(const Sum* sums, int64_t ld_sums, Sum alpha,
                                         const View<T>* input, Sum beta, T* __restrict out,
                                         int64_t ld_out, int64_t rows, int64_t columns) {
  alignas(64) Sum line[kMaxBlockEdge] = {};
  for (int64_t r = 0; r < rows; ++r, out += ld_out) {
    if (sums) {
      for (int64_t c = 0; c < columns; ++c) line[c] = alpha * sums[r * ld_sums + c];
    }
    if (input) {
      const T* from = input->data + r * input->row_stride;
      for (int64_t c = 0; c < columns; ++c) {
        const Sum addend = beta * static_cast<Sum>(widen(from[c * input->column_stride]));
        line[c] = sums ? line[c] + addend : addend;
      }
    }
    for (int64_t c = 0; c < columns; ++c) narrow(line[c], out[c]);
  }
}

}  // namespace spamm::cpu
