// The parameters of the multiply kernels: raw pointers, sizes and strides (in elements).
#pragma once

#include <cstdint>

#include "kernels/common/tau.h"

namespace spamm::kernels {

// One operand. It is contiguous along K (k_major) or along its other dimension, M or N; `leading`
// is the stride of the dimension that is not contiguous. Address, leading and batch stride are
// multiples of 16 bytes.
struct Operand {
  const void* data;
  int64_t batch_stride, leading;
  bool k_major;
};

// C = alpha * (A B over valid blocks) + beta * input.
template <class Norm>
struct MultiplyParams {
  Operand a, b;
  // Rows [first_own_row, first_own_row + own_rows) of B, if there are any, are read from own_b,
  // which has b's order. Only Hopper's kernels of half types and float64 can. The rows start at a
  // multiple of 64 and end at one or at K. There is no batch.
  Operand own_b;
  int64_t first_own_row, own_rows;
  const Norm* norm_a;  // (batch, ceil(M / block_m), ceil(K / block_k)), contiguous
  const Norm* norm_b;  // (batch, ceil(K / block_k), ceil(N / block_n)), contiguous
  Tau<Norm> tau;
  int64_t batch, m, n, k;
  int log2_block_m, log2_block_k, log2_block_n;
  Norm alpha, beta;
  const void* input;         // of C's type; null if there is none or beta is 0
  int64_t input_strides[3];  // batch, row, column; 0 along a broadcast dimension
  void* c;  // (batch, M, N), rows contiguous; its address is a multiple of 16 bytes
  int64_t c_batch_stride, c_leading;  // c_leading: the stride of a row

  // Counts the tiles that thread blocks have claimed, in device memory. No other product may use
  // the counter until this one has ended. The launch sets it to zero unless next_tile_is_zero.
  int* next_tile;
  bool next_tile_is_zero;  // it is zero once the previous kernel of the stream has ended

  // Only what lies on and above the diagonal is asked for. A kernel may leave the rest as it was,
  // or write what it likes there.
  bool upper_only;
};

}  // namespace spamm::kernels
