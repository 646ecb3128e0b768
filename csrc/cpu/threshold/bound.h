// The error bound from what each block row of C loses, and the threshold for a maximum error.
#pragma once

#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <vector>

#include "cpu/norm_map/strip_norms.h"
#include "cpu/threshold/norm_products.h"
#include "norm_slack.h"

namespace spamm::cpu {

// The norm of `numbers`, each taken as of(number). They must not be negative.
template <class N, class Of = std::identity>
double norm_of(const N* numbers, int64_t size, const Of& of = {}) {
  double largest = 0;
  for (int64_t n = 0; n < size && !std::isnan(largest); ++n)
    largest = of(numbers[n]) <= largest ? largest : of(numbers[n]);
  return scaled_norm(largest, [&](const auto& visit) {
    std::for_each_n(numbers, size, [&](N x) { visit(of(x)); });
  });
}

// At least `x`.
template <class N>
N rounded_up(double x) {
  const N rounded = static_cast<N>(x);
  return rounded < x ? std::nextafter(rounded, std::numeric_limits<N>::infinity()) : rounded;
}

// The error bound, rounded up. It includes the rounding of the norms and of sums of at most
// `additions` terms.
template <class N>
N bound_of_rows(const std::vector<double>& row_bounds, int64_t additions) {
  const double slack = kernels::kNormSlack<N> +
                       static_cast<double>(additions) * std::numeric_limits<double>::epsilon();
  const double root =
      kernels::at_most(norm_of(row_bounds.data(), static_cast<int64_t>(row_bounds.size())));
  return rounded_up<N>(kernels::at_most(root * (1 + slack)));
}

// Norms without an order.
template <class N>
struct NormSpan {
  const N* norms;
  int64_t size;
};

// The largest threshold whose bound, bound_at(tau), is at most max_error * norm(A) * norm(B).
// guess(limit) is tried first, if there is one.
template <class N, class BoundAt, class Guess>
N find_tau_for_error_of(NormSpan<N> a, NormSpan<N> b, double max_error, const BoundAt& bound_at,
                        const Guess& guess) {
  const auto at_least = [](N x) { return kernels::at_least(x); };
  const double norm_a = norm_of(a.norms, a.size, at_least);
  const double norm_b = norm_of(b.norms, b.size, at_least);
  const double limit = kernels::largest_bound<N>(max_error, norm_a, norm_b);
  constexpr N kInfinity = std::numeric_limits<N>::infinity();
  if (!std::isfinite(limit))
    return kernels::may_skip_all(max_error, norm_a, norm_b) ? kInfinity : N(0);
  const auto holds = [&](N tau) { return bound_at(tau) <= limit; };
  const std::optional<N> tau = guess(limit);
  const bool is_largest =
      tau && holds(*tau) && (*tau == kInfinity || !holds(std::nextafter(*tau, kInfinity)));
  return is_largest ? *tau : largest_threshold<N>(holds);
}

}  // namespace spamm::cpu
