// Thresholds, valid counts and error bounds on the CPU. The searches for tau are exact.
// For a maximum error, a faster search is tried first and its result checked.
#include "threshold.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <numeric>
#include <optional>
#include <type_traits>
#include <vector>

#include "checks.h"
#include "cpu/common/machine.h"
#include "cpu/threshold/norm_products.h"
#include "norm_slack.h"

namespace spamm::cpu {

// ---- The search for an error -------------------------------------------------------------------

// A fast search of the threshold for a maximum error, whose result has to be checked.
//
// The bound changes only where tau passes a product of norms, so the largest tau within the limit
// is such a product. A few bisections by bit patterns narrow the range. The products that are left
// are sorted, and bisected with their losses alone. Sums are plain and in another order than the
// bound's own: the result may be off by rounding, which the caller sees when it checks it.

// losses[j] += the largest products of norms stored as `a` > 0 and b[j], where they are skipped.
SPAMM_INLINE void add_losses_of(double a, const double* b, const double* skip_norm_b, int64_t nb,
                                double tau, double* __restrict losses) {
  constexpr double kRounding = std::numeric_limits<double>::denorm_min();  // of what underflows
  const double loss_a = kernels::at_most(a);
  for (int64_t j = 0; j < nb; ++j) {
    const double product = b[j] > 0 ? loss_a * kernels::at_most(b[j]) + kRounding : 0.0;
    losses[j] += a * skip_norm_b[j] < tau ? product : 0.0;
  }
}

// In two loops, since one with both types is vectorised badly. `a` is finite.
SPAMM_INLINE void add_losses_of(float a, const float* b, const float* skip_norm_b, int64_t nb,
                                float tau, double* __restrict losses) {
  constexpr int64_t kColumns = 64;
  const double wide_a = kernels::at_most(a);
  for (int64_t first = 0; first < nb; first += kColumns) {
    const int64_t size = std::min(kColumns, nb - first);
    float lost[kColumns];
    for (int64_t j = 0; j < size; ++j)
      lost[j] = a * skip_norm_b[first + j] < tau ? kernels::at_most(b[first + j]) : 0.0f;
    for (int64_t j = 0; j < size; ++j) losses[first + j] += wide_a * lost[j];
  }
}

// losses[j] += the norm products of the skipped k in column j.
template <class N>
SPAMM_CPU_CLONES void add_losses(const N* a, const N* b, const N* skip_norm_b, int64_t kb,
                                 int64_t nb, N tau, double* __restrict losses) {
  for (int64_t k = 0; k < kb; ++k, b += nb, skip_norm_b += nb) {
    // No product of an infinity or NaN is skipped.
    if (std::isfinite(a[k]) && a[k] > 0) add_losses_of(a[k], b, skip_norm_b, nb, tau, losses);
  }
}

// In several sums, so that one addition need not wait for another.
SPAMM_CPU_CLONES static double sum_of_squares(const double* numbers, int64_t size) {
  constexpr int64_t kSums = 16;
  double sums[kSums] = {};
  int64_t n = 0;
  for (; n + kSums <= size; n += kSums)
    for (int64_t s = 0; s < kSums; ++s) sums[s] += numbers[n + s] * numbers[n + s];
  for (int64_t s = 0; n + s < size; ++s) sums[s] += numbers[n + s] * numbers[n + s];
  return std::accumulate(sums, sums + kSums, 0.0);
}

template <class N>
SPAMM_CPU_CLONES int64_t count_between(N a, const N* b, int64_t size, N low, N high) {
  int64_t count = 0;
  for (int64_t j = 0; j < size; ++j) {
    const N product = a * b[j];
    count += (product >= low) & (product < high);
  }
  return count;
}

template <class N>
class ErrorSearch {
  using Bits = std::conditional_t<sizeof(N) == 4, uint32_t, uint64_t>;

 public:
  // Searches the largest tau whose losses have a norm of at most `limit`.
  ErrorSearch(const Maps<N>& maps, const N* skip_norm_b, double limit)
      : maps_(maps),
        skip_norm_b_(skip_norm_b),
        square_limit_(limit * limit),
        losses_(maps.batches * maps.mb * maps.nb) {}

  // Empty if squares leave the range of numbers, or too many products are nearly equal.
  std::optional<N> run() {
    if (!std::isnormal(square_limit_)) return std::nullopt;
    Bits low = 0, high = std::bit_cast<Bits>(std::numeric_limits<N>::infinity());
    if (holds(std::bit_cast<N>(high))) return std::bit_cast<N>(high);
    narrow_by_size(low, high);
    // Products that are expected in the interval.
    int64_t expected = maps_.batches * maps_.mb * maps_.kb * maps_.nb;
    while (expected > kFew && high - low > 1) {
      const Bits middle = low + (high - low) / 2;
      (holds(std::bit_cast<N>(middle)) ? low : high) = middle;
      expected /= 2;
    }
    return largest_product(std::bit_cast<N>(low), std::bit_cast<N>(high));
  }

 private:
  static constexpr int64_t kFew = 128, kMost = 64 << 10;  // products that are sorted

  struct Product {
    N value;
    int64_t place;  // among the losses
    double loss;
  };

  // Sets losses_ to those at a threshold. Returns whether they are within the limit.
  bool holds(N tau) {
    const int64_t nb = maps_.nb;
    const auto losses_of_rows = [&](int64_t from, int64_t to, double sum) {
      for (int64_t row = from; row < to; ++row) {
        const N* b = maps_.b_for_row(row);
        double* losses = losses_.data() + row * nb;
        std::fill_n(losses, nb, 0.0);
        add_losses(maps_.row_of_a(row), b, skip_norm_b_ + (b - maps_.b), maps_.kb, nb, tau, losses);
        sum += sum_of_squares(losses, nb);
      }
      return sum;
    };
    return at::parallel_reduce(0, maps_.batches * maps_.mb, grain(maps_.kb * nb), 0.0,
                               losses_of_rows, std::plus<>()) <= square_limit_;
  }

  // Every loss is a sum of kb products below tau. So tau may be at least this large, and few
  // thresholds are 2^30 times as large.
  void narrow_by_size(Bits& low, Bits& high) {
    const double losses = static_cast<double>(losses_.size());
    const double least = std::sqrt(square_limit_ / losses) / static_cast<double>(maps_.kb);
    const auto start = static_cast<N>(least), end = static_cast<N>(least * 0x1p30);
    if (std::isnormal(start) && holds(start)) low = std::bit_cast<Bits>(start);
    if (std::isfinite(end) && end > start && !holds(end)) high = std::bit_cast<Bits>(end);
  }

  // The largest product in [low, high) that is a threshold within the limit. `low` is within.
  std::optional<N> largest_product(N low, N high) {
    std::vector<Product> products;
    if (!collect(low, high, products)) return std::nullopt;
    std::sort(products.begin(), products.end(),
              [](const Product& x, const Product& y) { return x.value < y.value; });
    holds(low);
    std::optional<N> found;
    // In losses_ the first `lost` of the products are lost, in `within` the first `within_lost`.
    std::vector<double> within = losses_;
    size_t lost = 0, within_lost = 0, first = 0, end = products.size();
    while (first < end) {
      const size_t middle = first + (end - first) / 2;
      if (middle < lost) {
        losses_ = within;
        lost = within_lost;
      }
      for (; products[lost].value < products[middle].value; ++lost)
        losses_[products[lost].place] += products[lost].loss;
      if (sum_of_squares(losses_.data(), static_cast<int64_t>(losses_.size())) <= square_limit_) {
        found = products[middle].value;
        within = losses_;
        within_lost = lost;
        first = middle + 1;
      } else {
        end = middle;
      }
    }
    return found;
  }

  // Adds the products in [low, high). Returns false if they are too many.
  bool collect(N low, N high, std::vector<Product>& products) const {
    for (int64_t row = 0; row < maps_.batches * maps_.mb; ++row) {
      const N *a = maps_.row_of_a(row), *b = maps_.b_for_row(row);
      const N* skip = skip_norm_b_ + (b - maps_.b);
      for (int64_t k = 0; k < maps_.kb; ++k, b += maps_.nb, skip += maps_.nb) {
        if (count_between(a[k], skip, maps_.nb, low, high) == 0) continue;
        for (int64_t j = 0; j < maps_.nb; ++j) {
          const N value = a[k] * skip[j];
          if (value >= low && value < high)
            products.push_back({value, row * maps_.nb + j,
                                double{kernels::at_most(a[k])} * kernels::at_most(b[j])});
        }
        if (products.size() > kMost) return false;
      }
    }
    return true;
  }

  const Maps<N>& maps_;
  const N* skip_norm_b_;
  double square_limit_;
  std::vector<double> losses_;  // of each block of C
};
namespace {

using at::Tensor;
using OptTensor = std::optional<Tensor>;

template <class N>
N threshold_value(const Tensor& tau) {
  return static_cast<N>(tau.item<double>());
}

// ---- Valid products ----------------------------------------------------------------------------

// A column of A's map and a row of B's for each k of each batch.
template <class N>
ProductCounter<N> product_counter(const Maps<N>& maps) {
  const int64_t pairs = maps.batches * maps.kb;
  NormLists<N> columns{std::vector<N>(pairs * maps.mb), std::vector<int64_t>(pairs + 1)};
  NormLists<N> rows{{maps.b, maps.b + pairs * maps.nb}, std::vector<int64_t>(pairs + 1)};
  for (int64_t p = 0; p <= pairs; ++p) {
    columns.first[p] = p * maps.mb;
    rows.first[p] = p * maps.nb;
  }
  at::parallel_for(0, pairs, grain(maps.mb), [&](int64_t from, int64_t to) {
    for (int64_t p = from; p < to; ++p) {
      const N* column = maps.a + p / maps.kb * maps.mb * maps.kb + p % maps.kb;
      for (int64_t i = 0; i < maps.mb; ++i) columns.norms[p * maps.mb + i] = column[i * maps.kb];
    }
  });
  return {std::move(columns), std::move(rows)};
}

template <class N>
SPAMM_CPU_CLONES void count_row(const N* a, const N* b, int64_t kb, int64_t nb, N tau,
                                int32_t* __restrict counts) {
  for (int64_t k = 0; k < kb; ++k, b += nb)
    for (int64_t j = 0; j < nb; ++j) counts[j] += !(a[k] * b[j] < tau);
}

// ---- Error bound -------------------------------------------------------------------------------

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
  return bound_of_rows<N>(row_bounds, maps.kb + maps.nb + maps.batches * maps.mb);
}

template <class N>
N find_tau_for_error_of(const Maps<N>& maps, const N* skip_norm_b, double max_error) {
  const NormSpan<N> a{maps.a, maps.batches * maps.mb * maps.kb};
  const NormSpan<N> b{maps.b, maps.batches * maps.kb * maps.nb};
  return find_tau_for_error_of(
      a, b, max_error, [&](N tau) { return bound_at(maps, skip_norm_b, tau); },
      [&](double limit) { return ErrorSearch<N>(maps, skip_norm_b, limit).run(); });
}

// ---- Operators ---------------------------------------------------------------------------------

Tensor find_tau(FindTauArguments& x) {
  check_find_tau(x);
  const Tensor skip_norms = x.skip_norm_b.value_or(x.norm_b).contiguous();
  return dispatch_norms(x.norm_a, [&](auto type) {
    using N = decltype(type);
    const Maps<N> maps(x.norm_a, x.valid_ratio ? skip_norms : x.norm_b);
    const N tau = x.valid_ratio
                      ? find_tau_of(product_counter(maps), *x.valid_ratio)
                      : find_tau_for_error_of(maps, skip_norms.const_data_ptr<N>(), *x.max_error);
    return at::scalar_tensor(tau, x.norm_a.options());
  });
}

Tensor valid_counts(const Tensor& norm_a, const Tensor& norm_b, const Tensor& tau) {
  check_norm_maps(norm_a, norm_b);
  check_tau(tau, norm_a.device());
  const auto shape = product_shape(norm_a, norm_b);
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

Tensor error_bound(const Tensor& norm_a, const Tensor& norm_b, const Tensor& tau,
                   const OptTensor& skip_norm_b) {
  check_norm_maps(norm_a, norm_b);
  check_tau(tau, norm_a.device());
  check_skip_norm_map(skip_norm_b, norm_b);
  const Tensor skip_norms = skip_norm_b.value_or(norm_b).contiguous();
  return dispatch_norms(norm_a, [&](auto type) {
    using N = decltype(type);
    const Maps<N> maps(norm_a, norm_b);
    const N bound = bound_at(maps, skip_norms.const_data_ptr<N>(), threshold_value<N>(tau));
    return at::scalar_tensor(bound, norm_a.options());
  });
}

}  // namespace

TORCH_LIBRARY_IMPL(spamm_torch, CPU, m) {
  m.impl("find_tau", boxed<&find_tau>());
  m.impl("valid_counts", &valid_counts);
  m.impl("error_bound", &error_bound);
}

}  // namespace spamm::cpu
