// A fast search of the threshold for a maximum error, whose result has to be checked.
//
// The bound changes only where tau passes a product of norms, so the largest tau within the limit
// is such a product. A few bisections by bit patterns narrow the range. The products that are left
// are sorted, and bisected with their losses alone. Sums are plain and in another order than the
// bound's own: the result may be off by rounding, which the caller sees when it checks it.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <optional>
#include <type_traits>
#include <vector>

#include "cpu/common/machine.h"
#include "cpu/threshold/norm_products.h"
#include "norm_slack.h"

namespace spamm::cpu {

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
    const int64_t products = maps_.batches * maps_.mb * maps_.kb * maps_.nb;
    for (auto expected = static_cast<double>(products); expected > kFew && high - low > 1;
         expected /= 2) {
      const Bits middle = low + (high - low) / 2;
      (holds(std::bit_cast<N>(middle)) ? low : high) = middle;
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

}  // namespace spamm::cpu
