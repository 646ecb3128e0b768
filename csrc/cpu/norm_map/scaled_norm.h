// The root of a sum of squares, without overflow and without loss of small terms.
#pragma once

#include <algorithm>
#include <cmath>

namespace spamm::cpu {

// each(visit) calls visit(x) for every number x. `largest` is their largest magnitude; if it is
// zero, infinite or NaN, it is the result. The numbers are scaled by a power of two, which is
// exact.
template <class Each>
double scaled_norm(double largest, const Each& each) {
  if (largest == 0 || !std::isfinite(largest)) return largest;
  // Scaled by 2^1000, even the smallest subnormal, 2^-1074, has a normal square.
  const int exponent = std::max(std::ilogb(largest), -1000);
  const double scale = std::ldexp(1.0, -exponent);
  // Compensated summation. In a plain sum, equal squares are all rounded the same way, and a long
  // sum would be less accurate than the error bound assumes.
  double sum = 0, excess = 0;
  each([&](double x) {
    const double square = (x * scale) * (x * scale) - excess;
    const double next = sum + square;
    excess = (next - sum) - square;
    sum = next;
  });
  return std::ldexp(std::sqrt(sum), exponent);
}

}  // namespace spamm::cpu
