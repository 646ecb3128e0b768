// The most by which rounding of the norms can change the error bound. The same on every device.
#pragma once

#include <limits>

namespace spamm::kernels {

// The largest relative error of a product of two norms. Each norm has a relative error of at most
// 2^-19 (float32) or 2^-45 (float64), or an absolute one of the smallest number of its type.
template <class Norm>
constexpr double kNormSlack = sizeof(Norm) == 4 ? 0x1p-18 : 0x1p-44;

// The most and the least that a norm that is stored as `x` may be, but for the relative error.
// Differs from x where x is subnormal or nearly so: else the sum rounds to x. A norm of 0 is exact.
template <class Norm>
constexpr Norm at_most(Norm x) {
  constexpr Norm kSmallest = std::numeric_limits<Norm>::denorm_min();
  return x + (x < kSmallest ? x : kSmallest);
}
template <class Norm>
constexpr Norm at_least(Norm x) {
  constexpr Norm kSmallest = std::numeric_limits<Norm>::denorm_min();
  return x > kSmallest ? x - kSmallest : x;
}

// A computed error bound must not exceed this value to stay within max_error * norm(A) * norm(B).
// `norm_a` and `norm_b` are computed from the norm maps, each norm at_least.
template <class Norm>
constexpr double largest_bound(double max_error, double norm_a, double norm_b) {
  return max_error * norm_a * norm_b * (1 - 2 * kNormSlack<Norm>);
}

// Tells whether all may be skipped where it is infinite or NaN: at most norm(A) * norm(B) is lost.
constexpr bool may_skip_all(double max_error, double norm_a, double norm_b) {
  constexpr double kLargest = std::numeric_limits<double>::max();
  return max_error >= 2 && norm_a <= kLargest && norm_b <= kLargest;
}

}  // namespace spamm::kernels
