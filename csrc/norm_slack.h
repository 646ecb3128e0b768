// How much rounding of the norms can change the error bound. The same on every device.
#pragma once

namespace spamm::kernels {

// The largest relative error of a product of two norms. Each norm has a relative error of at most
// 2^-19 (float32) or 2^-45 (float64).
template <class Norm>
constexpr double kNormSlack = sizeof(Norm) == 4 ? 0x1p-18 : 0x1p-44;

// A computed error bound must not exceed this value to stay within max_error * norm(A) * norm(B).
// `norm_a` and `norm_b` are computed from the norm maps.
template <class Norm>
constexpr double largest_bound(double max_error, double norm_a, double norm_b) {
  return max_error * norm_a * norm_b * (1 - 2 * kNormSlack<Norm>);
}

}  // namespace spamm::kernels
