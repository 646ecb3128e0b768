// Thresholds, valid counts and error bounds on the CPU.
//
// The searches for tau are exact: they bisect the bit patterns of thresholds, which have the order
// of the numbers. For a maximum error, a faster search is tried first and its result checked. To
// count the valid products at a threshold, the norms of A's column k and of B's row k are sorted
// once for each k. Two pointers then count in O(M + N), because rounded products are monotonic in
// their factors.
#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <limits>
#include <optional>
#include <type_traits>
#include <vector>

#include "checks.h"
#include "cpu/common/clones.h"
#include "cpu/norm_map/scaled_norm.h"
#include "cpu/threshold/error_search.h"
#include "cpu/threshold/maps.h"
#include "norm_slack.h"

namespace spamm::cpu {
namespace {

using at::Tensor;
using OptTensor = std::optional<Tensor>;

template <class N>
N threshold_value(const Tensor& tau) {
  return static_cast<N>(tau.item<double>());
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

// ---- Valid products ----------------------------------------------------------------------------

// Counts the valid block products of all k and batches at a threshold.
template <class N>
class ProductCounter {
 public:
  explicit ProductCounter(const Maps<N>& maps) : mb_(maps.mb), nb_(maps.nb) {
    const int64_t pairs = maps.batches * maps.kb;
    columns_.resize(pairs * mb_);
    rows_.assign(maps.b, maps.b + pairs * nb_);
    finite_.resize(pairs);
    at::parallel_for(0, pairs, grain(8 * (mb_ + nb_)), [&](int64_t from, int64_t to) {
      for (int64_t p = from; p < to; ++p) {
        const N* column = maps.a + p / maps.kb * mb_ * maps.kb + p % maps.kb;
        for (int64_t i = 0; i < mb_; ++i) columns_[p * mb_ + i] = column[i * maps.kb];
        finite_[p] = {sort_finite(&columns_[p * mb_], mb_), sort_finite(&rows_[p * nb_], nb_)};
      }
    });
  }

  int64_t total() const { return static_cast<int64_t>(finite_.size()) * mb_ * nb_; }

  int64_t valid_at(N tau) const {
    return at::parallel_reduce(
        0, static_cast<int64_t>(finite_.size()), grain(mb_ + nb_), int64_t{0},
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

  // Moves the finite norms to the front in ascending order. Returns their number.
  static int64_t sort_finite(N* norms, int64_t size) {
    N* end = std::partition(norms, norms + size, [](N x) { return std::isfinite(x); });
    std::sort(norms, end);
    return end - norms;
  }

  int64_t valid_of_pair(int64_t p, N tau) const {
    const N *a = &columns_[p * mb_], *b = &rows_[p * nb_];
    const auto [finite_a, finite_b] = finite_[p];
    // Products with a norm that is not finite are NaN or infinite, hence valid at any threshold.
    int64_t count = mb_ * nb_ - finite_a * finite_b;
    for (int64_t i = 0, j = finite_b; i < finite_a; ++i) {
      while (j > 0 && !(a[i] * b[j - 1] < tau)) --j;
      count += finite_b - j;
    }
    return count;
  }

  int64_t mb_, nb_;
  std::vector<N> columns_, rows_;  // columns of A's map and rows of B's, each sorted
  std::vector<Finite> finite_;
};

template <class N>
N find_tau_of(const Maps<N>& maps, double valid_ratio) {
  const ProductCounter<N> products(maps);
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

template <class N>
SPAMM_CPU_CLONES void count_row(const N* a, const N* b, int64_t kb, int64_t nb, N tau,
                                int32_t* __restrict counts) {
  for (int64_t k = 0; k < kb; ++k, b += nb)
    for (int64_t j = 0; j < nb; ++j) counts[j] += !(a[k] * b[j] < tau);
}

// ---- Error bound -------------------------------------------------------------------------------

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

// The error bound at a threshold. It includes the rounding of the norms and of the sums here.
template <class N>
N bound_at(const Maps<N>& maps, const N* skip_norm_b, N tau) {
  std::vector<double> row_bounds(maps.batches * maps.mb);
  at::parallel_for(0, row_bounds.size(), grain(maps.kb * maps.nb), [&](int64_t from, int64_t to) {
    std::vector<double> losses(maps.nb);
    for (int64_t row = from; row < to; ++row) {
      const N* b = maps.b_for_row(row);
      std::fill(losses.begin(), losses.end(), 0.0);
      add_losses(maps.row_of_a(row), b, skip_norm_b + (b - maps.b), maps.kb, maps.nb, tau,
                 losses.data());
      row_bounds[row] = kernels::at_most(norm_of(losses.data(), maps.nb));
    }
  });
  const double additions = maps.kb + maps.nb + row_bounds.size();
  const double slack = kernels::kNormSlack<N> + additions * std::numeric_limits<double>::epsilon();
  const double root = kernels::at_most(norm_of(row_bounds.data(), row_bounds.size()));
  const double bound = kernels::at_most(root * (1 + slack));
  const N rounded = static_cast<N>(bound);
  return rounded < bound ? std::nextafter(rounded, std::numeric_limits<N>::infinity()) : rounded;
}

template <class N>
N find_tau_for_error_of(const Maps<N>& maps, const N* skip_norm_b, double max_error) {
  const auto at_least = [](N x) { return kernels::at_least(x); };
  const double norm_a = norm_of(maps.a, maps.batches * maps.mb * maps.kb, at_least);
  const double norm_b = norm_of(maps.b, maps.batches * maps.kb * maps.nb, at_least);
  const double limit = kernels::largest_bound<N>(max_error, norm_a, norm_b);
  constexpr N kInfinity = std::numeric_limits<N>::infinity();
  if (!std::isfinite(limit))
    return kernels::may_skip_all(max_error, norm_a, norm_b) ? kInfinity : N(0);
  const auto holds = [&](N tau) { return bound_at(maps, skip_norm_b, tau) <= limit; };
  const std::optional<N> tau = ErrorSearch<N>(maps, skip_norm_b, limit).run();
  const bool is_largest =
      tau && holds(*tau) && (*tau == kInfinity || !holds(std::nextafter(*tau, kInfinity)));
  return is_largest ? *tau : largest_threshold<N>(holds);
}

// ---- Operators ---------------------------------------------------------------------------------

Tensor find_tau(const Tensor& norm_a, const Tensor& norm_b, double valid_ratio,
                int64_t max_iterations, double tolerance) {
  check_norm_maps(norm_a, norm_b);
  check_valid_ratio(valid_ratio);
  check_search(max_iterations, tolerance);
  return dispatch_norms(norm_a, [&](auto type) {
    const Maps<decltype(type)> maps(norm_a, norm_b);
    return at::scalar_tensor(find_tau_of(maps, valid_ratio), norm_a.options());
  });
}

Tensor valid_counts(const Tensor& norm_a, const Tensor& norm_b, const Tensor& tau) {
  check_norm_maps(norm_a, norm_b);
  check_tau(tau, norm_a.device());
  auto shape = norm_a.sizes().vec();
  shape.back() = norm_b.size(-1);
  const Tensor counts = at::zeros(shape, norm_a.options().dtype(at::kInt));
  dispatch_norms(norm_a, [&](auto type) {
    using N = decltype(type);
    const Maps<N> maps(norm_a, norm_b);
    const N value = threshold_value<N>(tau);
    int32_t* out = counts.mutable_data_ptr<int32_t>();
    const int64_t rows = maps.batches * maps.mb;
    at::parallel_for(0, rows, grain(maps.kb * maps.nb), [&](int64_t from, int64_t to) {
      for (int64_t row = from; row < to; ++row)
        count_row(maps.row_of_a(row), maps.b_for_row(row), maps.kb, maps.nb, value,
                  out + row * maps.nb);
    });
  });
  return counts;
}

// The map that decides what is skipped, checked against norm_b.
Tensor skip_norm_map(const Tensor& norm_b, const OptTensor& skip_norm_b) {
  check_skip_norm_map(skip_norm_b, norm_b);
  return skip_norm_b.value_or(norm_b).contiguous();
}

Tensor error_bound(const Tensor& norm_a, const Tensor& norm_b, const Tensor& tau,
                   const OptTensor& skip_norm_b) {
  check_norm_maps(norm_a, norm_b);
  check_tau(tau, norm_a.device());
  const Tensor skip_norms = skip_norm_map(norm_b, skip_norm_b);
  return dispatch_norms(norm_a, [&](auto type) {
    using N = decltype(type);
    const Maps<N> maps(norm_a, norm_b);
    const N bound = bound_at(maps, skip_norms.const_data_ptr<N>(), threshold_value<N>(tau));
    return at::scalar_tensor(bound, norm_a.options());
  });
}

Tensor find_tau_for_error(const Tensor& norm_a, const Tensor& norm_b, double max_error,
                          const OptTensor& skip_norm_b) {
  check_norm_maps(norm_a, norm_b);
  check_max_error(max_error);
  const Tensor skip_norms = skip_norm_map(norm_b, skip_norm_b);
  return dispatch_norms(norm_a, [&](auto type) {
    using N = decltype(type);
    const Maps<N> maps(norm_a, norm_b);
    const N tau = find_tau_for_error_of(maps, skip_norms.const_data_ptr<N>(), max_error);
    return at::scalar_tensor(tau, norm_a.options());
  });
}

}  // namespace

TORCH_LIBRARY_IMPL(spamm_torch, CPU, m) {
  m.impl("find_tau", &find_tau);
  m.impl("find_tau_for_error", &find_tau_for_error);
  m.impl("valid_counts", &valid_counts);
  m.impl("error_bound", &error_bound);
}

}  // namespace spamm::cpu
