// Norm maps as the threshold ops of the CPU read them, and searches of a threshold by counts of
// valid block products.
//
// They bisect the bit patterns of thresholds, which have the order of the numbers. To count the
// valid products at a threshold, the norms of A's column k and of B's row k are sorted once for
// each k. Two pointers then count in O(M + N), because rounded products are monotonic in their
// factors.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include "cpu/norm_map/strip_norms.h"
#include "norm_slack.h"

namespace spamm::cpu {

inline constexpr int64_t kStepsPerTask = 32 << 10;  // with fewer, starting a thread does not pay

// The number of items in a task, if an item takes `steps` steps.
inline int64_t grain(int64_t steps) {
  return std::max<int64_t>(1, kStepsPerTask / std::max<int64_t>(1, steps));
}

// Contiguous norm maps of a batch of products: A's (batches, MB, KB) and B's (batches, KB, NB).
template <class N>
struct Maps {
  at::Tensor owner_a, owner_b;
  const N *a, *b;
  int64_t batches, mb, kb, nb;

  Maps(const at::Tensor& norm_a, const at::Tensor& norm_b)
      : owner_a(norm_a.contiguous()),
        owner_b(norm_b.contiguous()),
        a(owner_a.const_data_ptr<N>()),
        b(owner_b.const_data_ptr<N>()),
        batches(c10::multiply_integers(norm_a.sizes().slice(0, norm_a.dim() - 2))),
        mb(norm_a.size(-2)),
        kb(norm_a.size(-1)),
        nb(norm_b.size(-1)) {}

  const N* row_of_a(int64_t row) const { return a + row * kb; }  // batch * mb + i
  const N* b_for_row(int64_t row) const { return b + row / mb * kb * nb; }
};

// function(a number of the maps' type).
template <class Function>
auto dispatch_norms(const at::Tensor& norm_a, const Function& function) {
  return norm_a.scalar_type() == at::kDouble ? function(double()) : function(float());
}

// The largest threshold in [0, +inf] for which `holds` is true. It must be true for 0, and false
// above any threshold for which it is false.
template <class N, class Predicate>
N largest_threshold(const Predicate& holds) {
  using Bits = std::conditional_t<sizeof(N) == 4, uint32_t, uint64_t>;
  Bits yes = 0, no = std::bit_cast<Bits>(std::numeric_limits<N>::infinity()) + 1;
  while (no - yes > 1) {
    const Bits middle = yes + (no - yes) / 2;
    (holds(std::bit_cast<N>(middle)) ? yes : no) = middle;
  }
  return std::bit_cast<N>(yes);
}

// Lists of norms, one behind the other: list p is norms[first[p]] to norms[first[p + 1] - 1].
template <class N>
struct NormLists {
  std::vector<N> norms;
  std::vector<int64_t> first;
};

// Counts the valid block products of all k and batches at a threshold. List p of A holds the norms
// of a column k, list p of B those of row k.
template <class N>
class ProductCounter {
 public:
  ProductCounter(NormLists<N> a, NormLists<N> b)
      : a_(std::move(a)), b_(std::move(b)), finite_(a_.first.size() - 1) {
    at::parallel_for(0, pairs(), grain(8 * mean_steps()), [&](int64_t from, int64_t to) {
      for (int64_t p = from; p < to; ++p) finite_[p] = {sort_finite(a_, p), sort_finite(b_, p)};
    });
    for (int64_t p = 0; p < pairs(); ++p) total_ += size(a_, p) * size(b_, p);
  }

  int64_t total() const { return total_; }

  int64_t valid_at(N tau) const {
    return at::parallel_reduce(
        0, pairs(), grain(mean_steps()), int64_t{0},
        [&](int64_t from, int64_t to, int64_t count) {
          for (int64_t p = from; p < to; ++p) count += valid_of_pair(p, tau);
          return count;
        },
        std::plus<>());
  }

 private:
  struct Finite {
    int64_t a, b;
  };

  int64_t pairs() const { return static_cast<int64_t>(finite_.size()); }
  int64_t mean_steps() const {
    const auto norms = static_cast<int64_t>(a_.norms.size() + b_.norms.size());
    return norms / std::max<int64_t>(1, pairs());
  }
  static int64_t size(const NormLists<N>& lists, int64_t p) {
    return lists.first[p + 1] - lists.first[p];
  }

  // Moves the finite norms to the front in ascending order. Returns their number.
  static int64_t sort_finite(NormLists<N>& lists, int64_t p) {
    N* const norms = lists.norms.data() + lists.first[p];
    N* end = std::partition(norms, norms + size(lists, p), [](N x) { return std::isfinite(x); });
    std::sort(norms, end);
    return end - norms;
  }

  int64_t valid_of_pair(int64_t p, N tau) const {
    const N *a = a_.norms.data() + a_.first[p], *b = b_.norms.data() + b_.first[p];
    const auto [finite_a, finite_b] = finite_[p];
    // Products with a norm that is not finite are NaN or infinite, hence valid at any threshold.
    int64_t count = size(a_, p) * size(b_, p) - finite_a * finite_b;
    for (int64_t i = 0, j = finite_b; i < finite_a; ++i) {
      while (j > 0 && !(a[i] * b[j - 1] < tau)) --j;
      count += finite_b - j;
    }
    return count;
  }

  NormLists<N> a_, b_;  // each list sorted
  std::vector<Finite> finite_;
  int64_t total_ = 0;
};

// The threshold whose share of valid products is nearest to `valid_ratio`.
template <class N>
N find_tau_of(const ProductCounter<N>& products, double valid_ratio) {
  if (products.total() == 0) return 0;
  const double target = valid_ratio * static_cast<double>(products.total());
  const auto largest_with = [&](double count) {
    return largest_threshold<N>(
        [&](N tau) { return static_cast<double>(products.valid_at(tau)) >= count; });
  };
  // tau has the smallest count that is not below the target. The next number above tau has the
  // largest count below it.
  const N tau = largest_with(target);
  constexpr N kInfinity = std::numeric_limits<N>::infinity();
  if (tau == kInfinity) return tau;
  const auto upper = static_cast<double>(products.valid_at(tau));
  const auto lower = static_cast<double>(products.valid_at(std::nextafter(tau, kInfinity)));
  return target - lower < upper - target ? largest_with(lower) : tau;
}

// ---- The bound ---------------------------------------------------------------------------------

// The error bound from what each block row of C loses, and the threshold for a maximum error.

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
