// Root of a sum of squares that neither overflows nor loses small terms.
#pragma once

#include <algorithm>
#include <cmath>

namespace spamm::cpu {

// sqrt of the sum of x^2 over the numbers that `each` shows its visitor. `largest` is the largest
// magnitude among them; it is also the result where it is zero, infinite or NaN. The numbers are
// scaled by a power of two, which changes no digit.
template <class Each>
double scaled_norm(double largest, const Each& each) {
  if (largest == 0 || !std::isfinite(largest)) return largest;
  // 2^1000 brings even the least subnormal, 2^-1074, to where its square is normal.
  const int exponent = std::max(std::ilogb(largest), -1000);
  const double scale = std::ldexp(1.0, -exponent);
  // Compensated: equal squares would all be rounded the same way, and a long sum lose digits that
  // the error bound counts on.
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
