// Thresholds and error bounds of block-sparse products, over the products of stored blocks, and
// which blocks of a result are dropped.
#include "checks.h"
#include "cpu/threshold/norm_products.h"
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

// The step of a threshold. Its cost is dense storage's error bound: blocks not stored lose nothing.
template <class N>
Step<N> step_at(const CsrMaps<N>& maps, N tau) {
  std::vector<double> row_bounds(maps.a.rows);
  const auto add_rows = [&](int64_t from, int64_t to, Step<N> step) {
    std::vector<double> losses(maps.b.columns), lost;
    std::vector<int64_t> columns;
    for (int64_t i = from; i < to; ++i) {
      maps.each_product(i, 0, [&](int64_t slot_a, int64_t slot_b, int64_t j) {
        const N a = maps.norm_a[slot_a], b = maps.norm_b[slot_b];
        step.include(a * b, a * b < tau);
        if (!(a * b < tau) || !(a > 0) || !(b > 0)) return;
        if (losses[j] == 0) columns.push_back(j);
        losses[j] += loss_of(a, b);
      });
      lost.clear();
      for (const int64_t j : columns) lost.push_back(std::exchange(losses[j], 0.0));
      columns.clear();
      row_bounds[i] = kernels::at_most(norm_of(lost.data(), static_cast<int64_t>(lost.size())));
    }
    return step;
  };
  Step<N> step = at::parallel_reduce(0, maps.a.rows, grain(maps.mean_products()), Step<N>(),
                                     add_rows, Step<N>::joined);
  step.cost = bound_of_rows<N>(row_bounds, maps.b.rows + maps.b.columns + maps.a.rows);
  return step;
}

Tensor bsr_find_tau(BsrFindTauArguments& x) {
  const CheckedMaps maps(x);
  check_search({.valid_ratio = x.valid_ratio, .max_error = x.max_error});
  return dispatch_norms(x.norm_a, [&](auto type) {
    using N = decltype(type);
    const CsrMaps<N> of(maps);
    const double places = static_cast<double>(of.a.rows) * static_cast<double>(of.b.columns);
    const N tau = x.valid_ratio
                      ? find_tau_of(product_counter(of), *x.valid_ratio)
                      : find_tau_for_error_of<N>(maps.norm_a, maps.norm_b, *x.max_error,
                                                 std::sqrt(places) * static_cast<double>(of.b.rows),
                                                 [&](N at) { return step_at(of, at); });
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
    const auto bound = static_cast<N>(step_at(of, tau).cost);
    return std::make_tuple(at::scalar_tensor(bound, x.norm_a.options()), products);
  });
}

// The smallest norm with which the sum of all norms' squares up to it passes most^2; infinity if
// none does. Squares are whole numbers of a small unit, as on CUDA.
template <class N>
double limit_of_loss(const N* norms, int64_t stored, double most) {
  std::vector<N> ascending(norms, norms + stored);
  const auto key = [](N x) { return std::isnan(x) ? std::numeric_limits<N>::infinity() : x; };
  std::transform(ascending.begin(), ascending.end(), ascending.begin(), key);
  std::sort(ascending.begin(), ascending.end());
  const double unit = std::min(0x1p52, 0x1p62 / static_cast<double>(stored));
  const double slack = 1 + 2 * kernels::kNormSlack<N>;
  auto left = static_cast<uint64_t>(unit / (slack * slack));
  for (const N x : ascending) {
    const double ratio = kernels::at_most(x) / most, square = ratio * ratio;
    const auto units = static_cast<uint64_t>(std::ceil((square < 1.5 ? square : 1.5) * unit));
    if (units > left) return x;
    left -= units;
  }
  return std::numeric_limits<double>::infinity();
}

BsrDrop bsr_drop(BsrDropArguments& x) {
  check_drop(x);
  const Pattern pattern(x.crow, x.col, std::numeric_limits<int64_t>::max(), "the result");
  return dispatch_norms(x.norms, [&](auto type) -> BsrDrop {
    using N = decltype(type);
    const Tensor owner = x.norms.contiguous();
    const N* const norms = owner.const_data_ptr<N>();
    const int64_t stored = owner.numel();
    double limit = x.below;
    if (x.share) {
      const double whole =
          least_norm<N>(x.norm_a->contiguous()) * least_norm<N>(x.norm_b->contiguous());
      const double most =
          std::isfinite(whole) ? *x.share * whole * (1 - 4 * kernels::kNormSlack<N>) : 0;
      limit = most > 0 ? std::min(limit, limit_of_loss(norms, stored, most)) : 0;
    }
    const auto index = x.norms.options().dtype(at::kLong);
    const Tensor crow = at::empty({pattern.rows + 1}, index);
    std::vector<int64_t> numbers;
    std::vector<double> gone;
    double trace = 0;
    for (int64_t i = 0; i < pattern.rows; ++i) {
      crow.mutable_data_ptr<int64_t>()[i] = static_cast<int64_t>(numbers.size());
      for (int64_t e = pattern.crow[i]; e < pattern.crow[i + 1]; ++e) {
        const bool is_mirror = x.symmetric && pattern.col[e] < i;
        const int64_t mirror = is_mirror ? pattern.find(pattern.col[e], i) : e;
        if (norms[mirror < 0 ? e : mirror] < limit) {
          gone.push_back(kernels::at_most(norms[e]));
        } else {
          numbers.push_back(e);
          if (x.values && pattern.col[e] == i)
            trace += (*x.values)[e].diagonal().sum(at::kDouble).item<double>();
        }
      }
    }
    const auto count = static_cast<int64_t>(numbers.size());
    crow.mutable_data_ptr<int64_t>()[pattern.rows] = count;
    const Tensor places = at::tensor(numbers, index);
    const Tensor col = pattern.owner_col.index_select(0, places);
    const Tensor kept = owner.index_select(0, places);
    const double lost = norm_of(gone.data(), static_cast<int64_t>(gone.size()));
    const N bound = rounded_up<N>(kernels::at_most(lost * (1 + 2 * kernels::kNormSlack<N>)));
    Tensor sums = at::empty({0}, owner.options().dtype(at::kDouble));
    if (x.values) sums = at::tensor({trace, norm_of(kept.const_data_ptr<N>(), count)}, at::kDouble);
    return {crow, col, kept, places, at::scalar_tensor(bound, owner.options()), sums};
  });
}

}  // namespace

TORCH_LIBRARY_IMPL(spamm_torch, CPU, m) {
  m.impl("bsr_find_tau", boxed<&bsr_find_tau>());
  m.impl("bsr_error_bound", boxed<&bsr_error_bound>());
  m.impl("bsr_drop", boxed<&bsr_drop>());
}

}  // namespace spamm::cpu
