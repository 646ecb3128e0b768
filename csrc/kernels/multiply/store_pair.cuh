// Stores from the registers of matrix instructions, whose results are pairs of neighbours in a row:
// where four lanes' pairs fill sectors, C needs no way round through shared memory.
#pragma once

#include "kernels/multiply/params.h"

namespace spamm::kernels {

template <class T>
struct alignas(2 * sizeof(T)) EntryPair {
  T x, y;
};

// alpha * (x, y) + beta * input as neighbours of a row of C, from `column` on. kPairs: both exist,
// aligned, and nothing is added.
template <bool kPairs, class T>
__device__ __forceinline__ void store_pair(const MultiplyParams<T>& p, int batch, int64_t row,
                                           int64_t column, T x, T y) {
  T* const to = static_cast<T*>(p.c) + (batch * p.m + row) * p.n + column;
  if constexpr (kPairs) {
    *reinterpret_cast<EntryPair<T>*>(to) = {p.alpha * x, p.alpha * y};
  } else {
    if (row >= p.m) return;
    const T values[2] = {x, y};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (column + i >= p.n) return;
      T value = p.alpha * values[i];
      if (p.input != nullptr) {
        value += p.beta * static_cast<const T*>(
                              p.input)[batch * p.input_strides[0] + row * p.input_strides[1] +
                                       (column + i) * p.input_strides[2]];
      }
      to[i] = value;
    }
  }
}

}  // namespace spamm::kernels
