// Root of a sum of squares that neither overflows nor loses small terms.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

namespace spamm::cpu {

// sqrt of the sum of x^2 over the numbers x that `each` shows its visitor; it is called twice. The
// numbers are scaled by a power of two, which changes no digit. NaN if one is NaN, else infinite if
// one is infinite.
template <class Each>
double scaled_norm(const Each& each) {
  double largest = 0;
  bool has_nan = false;
  each([&](double x) {
    largest = std::max(largest, std::abs(x));
    has_nan |= std::isnan(x);
  });
  if (has_nan) return std::numeric_limits<double>::quiet_NaN();
  if (largest == 0 || std::isinf(largest)) return largest;
  // 2^1000 brings even the least subnormal, 2^-1074, to where its square is normal.
  const int exponent = std::max(std::ilogb(largest), -1000);
  const double scale = std::ldexp(1.0, -exponent);
  double sum = 0;
  each([&](double x) { sum += (x * scale) * (x * scale); });
  return std::ldexp(std::sqrt(sum), exponent);
}

}  // namespace spamm::cpu
