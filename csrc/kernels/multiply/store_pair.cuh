// Stores sums from registers to C. A matrix instruction gives each lane pairs of neighbouring
// columns. For 4-byte and 8-byte entries the pairs of four lanes fill whole memory sectors, so
// staging C in shared memory would gain nothing.
#pragma once

#include "kernels/multiply/params.h"

namespace spamm::kernels {

template <class T>
struct alignas(2 * sizeof(T)) EntryPair {
  T x, y;
};

// Writes alpha * x + beta * input to `column` of a row of C, and the same with y to the next one.
// kPairs: both columns exist, their address is aligned, and there is no input.
template <bool kPairs, class T>
__device__ __forceinline__ void store_pair(const MultiplyParams<T>& p, int batch, int64_t row,
                                           int64_t column, T x, T y) {
  T* const to = static_cast<T*>(p.c) + batch * p.c_batch_stride + row * p.c_leading + column;
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
