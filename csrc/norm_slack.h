// What the norms' own rounding may change in a bound of the error, the same on every device.
#pragma once

namespace spamm::kernels {

// How far a product of two norms, relative to itself, may be from the true one: each norm is right
// to 2^-19 (float32) or 2^-45 (float64).
template <class Norm>
constexpr double kNormSlack = sizeof(Norm) == 4 ? 0x1p-18 : 0x1p-44;

// The largest bound that keeps the promise max_error * norm(A) * norm(B), given the norms of the
// norm maps.
template <class Norm>
constexpr double largest_bound(double max_error, double norm_a, double norm_b) {
  return max_error * norm_a * norm_b * (1 - 2 * kNormSlack<Norm>);
}

}  // namespace spamm::kernels
