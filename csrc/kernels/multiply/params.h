// The parameters of the multiply kernels: raw pointers, sizes and strides (in elements).
#pragma once

#include <cstdint>

#include "kernels/common/tau.h"

namespace spamm::kernels {

// One operand, contiguous along K (k_major) or along its other dimension, M or N. `leading` is the
// distance between neighbours in the other direction. Address, leading and batch stride are
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
  const Norm* norm_a;  // (batch, ceil(M / block_m), ceil(K / block_k)), contiguous
  const Norm* norm_b;  // (batch, ceil(K / block_k), ceil(N / block_n)), contiguous
  Tau<Norm> tau;
  int64_t batch, m, n, k;
  int log2_block_m, log2_block_k, log2_block_n;
  Norm alpha, beta;
  const void* input;         // of C's type; null where beta is 0 or there is none
  int64_t input_strides[3];  // batch, row, column; 0 where input is broadcast
  void* c;                   // (batch, M, N), contiguous

  // Kernels that claim their tiles count the claims in an int of device memory, this product's own
  // until it is done. Where it is not zero yet, their launch sees to that.
  int* next_tile;
  bool next_tile_is_zero;  // at the latest when the kernel before on the stream is over
};

}  // namespace spamm::kernels
