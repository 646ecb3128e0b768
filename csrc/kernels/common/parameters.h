// Parts of kernels' parameters: thresholds, 32-bit sizes, fast division by a number that is known
// before the launch, and the upper triangle of a square grid, numbered without gaps.
#pragma once

#include <cuda_runtime.h>

#include <bit>
#include <cstdint>

namespace spamm::kernels {

// A threshold, in the type of the norms. Either on the device, where the host never reads it, or by
// value.
template <class Norm>
struct Tau {
  const Norm* on_device;  // null: use `on_host`
  Norm on_host;

  __device__ Norm value() const { return on_device ? *on_device : on_host; }
};

struct Size2 {
  int rows, columns;
};

// Divides 31-bit numbers by multiplying with a rounded inverse. The quotient is exact: Granlund and
// Montgomery, "Division by invariant integers using multiplication" (1994).
struct Divisor {
  int divisor = 1;
  uint32_t inverse = 0;  // 2^(32 + shift) / divisor, rounded up
  int shift = 0;

  Divisor() = default;
  explicit Divisor(int divisor) : divisor(divisor) {
    if (divisor == 1) return;
    shift = std::bit_width(static_cast<uint32_t>(divisor - 1)) - 1;
    inverse = static_cast<uint32_t>(((uint64_t{1} << (32 + shift)) + divisor - 1) / divisor);
  }

#ifdef __CUDACC__
  __device__ void operator()(int& quotient, int& remainder, int dividend) const {
    quotient = divisor == 1 ? dividend : __umulhi(dividend, inverse) >> shift;
    remainder = dividend - quotient * divisor;
  }
#endif
};

struct GridPlace {
  int row, column;
};

// The places on and above the diagonal of a square grid, folded into a rectangle: beside those of
// each row in the upper half of the grid stand those of a row in the lower half. A grid of T rows
// gives a rectangle of ceil(T / 2) rows and T columns, or T + 1 if T is even.
__host__ __device__ constexpr int folded_rows(int edge) { return (edge + 1) / 2; }
__host__ __device__ constexpr int folded_columns(int edge) { return edge | 1; }

// Finds where a place of the rectangle lies in the grid. The diagonal of the grid is that of the
// rectangle, and what it cuts off. The places of a column lie in one or two columns of the grid.
__device__ inline GridPlace unfold(GridPlace folded, int edge) {
  const int gap = folded_columns(edge) - edge;
  if (folded.column >= folded.row + gap) return {folded.row, folded.column - gap};
  return {edge - gap - folded.row, edge - 1 - folded.column};
}

}  // namespace spamm::kernels
