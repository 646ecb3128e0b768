// Thresholds and error bounds of block-sparse products, over the products of stored blocks.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "checks.h"
#include "cpu/threshold/bound.h"
#include "cpu/threshold/maps.h"
#include "cpu/threshold/product_counter.h"
#include "norm_slack.h"
#include "sparse/csr.h"

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

Tensor bsr_find_tau(BsrFindTauArguments& x) {
  const CheckedMaps maps(x);
  check_search({.valid_ratio = x.valid_ratio, .max_error = x.max_error});
  return dispatch_norms(x.norm_a, [&](auto type) {
    using N = decltype(type);
    const CsrMaps<N> of(maps);
    if (x.valid_ratio) {
      const N tau = find_tau_of(product_counter(of), *x.valid_ratio);
      return at::scalar_tensor(tau, x.norm_a.options());
    }
    const NormSpan<N> a{of.norm_a, of.a.stored()}, b{of.norm_b, of.b.stored()};
    const N tau = find_tau_for_error_of(
        a, b, *x.max_error, [&](N at) { return bound_at(of, at); },
        [](double) { return std::optional<N>(); });
    return at::scalar_tensor(tau, x.norm_a.options());
  });
}

// The bound, and the numbers of valid products and of those of stored blocks.
std::tuple<Tensor, Tensor> bsr_error_bound(BsrErrorBoundArguments& x) {
  const CheckedMaps maps(x);
  check_tau(x.tau, x.norm_a.device());
  return dispatch_norms(x.norm_a, [&](auto type) {
    using N = decltype(type);
    const CsrMaps<N> of(maps);
    const N tau = static_cast<N>(x.tau.item<double>());
    const Tensor products = at::zeros({2}, at::kLong);
    int64_t* const counts = products.mutable_data_ptr<int64_t>();
    for (int64_t i = 0; i < of.a.rows; ++i)
      of.each_product(i, 0, [&](int64_t slot_a, int64_t slot_b, int64_t) {
        counts[0] += !(of.norm_a[slot_a] * of.norm_b[slot_b] < tau);
        ++counts[1];
      });
    const N bound = bound_at(of, tau);
    return std::make_tuple(at::scalar_tensor(bound, x.norm_a.options()), products);
  });
}

}  // namespace

TORCH_LIBRARY_IMPL(spamm_torch, CPU, m) {
  m.impl("bsr_find_tau", boxed<&bsr_find_tau>());
  m.impl("bsr_error_bound", boxed<&bsr_error_bound>());
}

}  // namespace spamm::cpu
