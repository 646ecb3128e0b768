// Division by numbers that are known before a launch.
#pragma once

#include <cuda_runtime.h>

#include <bit>
#include <cstdint>

namespace spamm::kernels {

// Division of 31-bit numbers by one that is known before the launch: by its rounded inverse, of
// which Granlund and Montgomery, "Division by invariant integers using multiplication" (1994), show
// that it gives the exact quotient.
struct Divisor {
  int divisor = 1;
  uint32_t inverse = 0;  // times 2^(32 + shift), rounded up
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
