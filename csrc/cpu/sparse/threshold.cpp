// Thresholds and error bounds of block-sparse products, over the products of stored blocks.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/scalar_tensor.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include "checks.h"
#include "cpu/sparse/csr.h"
#include "cpu/threshold/bound.h"
#include "cpu/threshold/maps.h"
#include "cpu/threshold/product_counter.h"
#include "norm_slack.h"

namespace spamm::cpu {
namespace {

using at::Tensor;

// The norms of A's block columns, and of B's block rows.
template <class N>
ProductCounter<N> product_counter(const CsrMaps<N>& maps) {
  const Pattern &a = maps.a, &b = maps.b;
  NormLists<N> columns{std::vector<N>(a.stored()), std::vector<int64_t>(a.columns + 1)};
  NormLists<N> rows{{maps.norm_b, maps.norm_b + b.stored()}, {b.crow, b.crow + b.rows + 1}};
  for (int64_t e = 0; e < a.stored(); ++e) ++columns.first[a.col[e] + 1];
  for (int64_t k = 0; k < a.columns; ++k) columns.first[k + 1] += columns.first[k];
  std::vector<int64_t> next = columns.first;
  for (int64_t e = 0; e < a.stored(); ++e) columns.norms[next[a.col[e]]++] = maps.norm_a[e];
  return {std::move(columns), std::move(rows)};
}

// At most what a skipped product of blocks with these norms is.
template <class N>
double loss_of(N a, N b) {
  constexpr double kUnderflow =
      std::is_same_v<N, double> ? std::numeric_limits<double>::denorm_min() : 0.0;
  return double{kernels::at_most(a)} * kernels::at_most(b) + kUnderflow;
}

// The error bound at a threshold, as that of dense storage: blocks that are not stored lose
// nothing.
template <class N>
N bound_at(const CsrMaps<N>& maps, N tau) {
  std::vector<double> row_bounds(maps.a.rows);
  at::parallel_for(0, maps.a.rows, grain(maps.mean_products()), [&](int64_t from, int64_t to) {
    std::vector<double> losses(maps.b.columns), lost;
    std::vector<int64_t> columns;
    for (int64_t i = from; i < to; ++i) {
      maps.each_product(i, 0, [&](int64_t slot_a, int64_t slot_b, int64_t j) {
        const N a = maps.norm_a[slot_a], b = maps.norm_b[slot_b];
        if (!(a * b < tau) || !(a > 0) || !(b > 0)) return;
        if (losses[j] == 0) columns.push_back(j);
        losses[j] += loss_of(a, b);
      });
      lost.clear();
      for (const int64_t j : columns) lost.push_back(std::exchange(losses[j], 0.0));
      columns.clear();
      row_bounds[i] = kernels::at_most(norm_of(lost.data(), static_cast<int64_t>(lost.size())));
    }
  });
  return bound_of_rows<N>(row_bounds, maps.b.rows + maps.b.columns + maps.a.rows);
}

Tensor bsr_find_tau(const Tensor& crow_a, const Tensor& col_a, const Tensor& norm_a,
                    const Tensor& crow_b, const Tensor& col_b, const Tensor& norm_b,
                    int64_t columns, double valid_ratio) {
  const CheckedMaps maps(crow_a, col_a, norm_a, crow_b, col_b, norm_b, columns);
  check_valid_ratio(valid_ratio);
  return dispatch_norms(norm_a, [&](auto type) {
    const ProductCounter products = product_counter(CsrMaps<decltype(type)>(maps));
    return at::scalar_tensor(find_tau_of(products, valid_ratio), norm_a.options());
  });
}

Tensor bsr_find_tau_for_error(const Tensor& crow_a, const Tensor& col_a, const Tensor& norm_a,
                              const Tensor& crow_b, const Tensor& col_b, const Tensor& norm_b,
                              int64_t columns, double max_error) {
  const CheckedMaps maps(crow_a, col_a, norm_a, crow_b, col_b, norm_b, columns);
  check_max_error(max_error);
  return dispatch_norms(norm_a, [&](auto type) {
    using N = decltype(type);
    const CsrMaps<N> of(maps);
    const NormSpan<N> a{of.norm_a, of.a.stored()}, b{of.norm_b, of.b.stored()};
    const N tau = find_tau_for_error_of(
        a, b, max_error, [&](N at) { return bound_at(of, at); },
        [](double) { return std::optional<N>(); });
    return at::scalar_tensor(tau, norm_a.options());
  });
}

Tensor bsr_error_bound(const Tensor& crow_a, const Tensor& col_a, const Tensor& norm_a,
                       const Tensor& crow_b, const Tensor& col_b, const Tensor& norm_b,
                       int64_t columns, const Tensor& tau) {
  const CheckedMaps maps(crow_a, col_a, norm_a, crow_b, col_b, norm_b, columns);
  check_tau(tau, norm_a.device());
  return dispatch_norms(norm_a, [&](auto type) {
    using N = decltype(type);
    const N bound = bound_at(CsrMaps<N>(maps), static_cast<N>(tau.item<double>()));
    return at::scalar_tensor(bound, norm_a.options());
  });
}

}  // namespace

TORCH_LIBRARY_IMPL(spamm_torch, CPU, m) {
  m.impl("bsr_find_tau", &bsr_find_tau);
  m.impl("bsr_find_tau_for_error", &bsr_find_tau_for_error);
  m.impl("bsr_error_bound", &bsr_error_bound);
}

}  // namespace spamm::cpu
