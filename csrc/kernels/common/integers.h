// 32-bit sizes, and fast division by a number that is known before the launch.
#pragma once

#include <cuda_runtime.h>

#include <bit>
#include <cstdint>

namespace spamm::kernels {

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

}  // namespace spamm::kernels
