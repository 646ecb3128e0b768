// Thresholds, valid counts and error bounds on the CPU. The searches for tau are exact.
#include "threshold.h"

#include "checks.h"
#include "cpu/common/machine.h"
#include "cpu/threshold/norm_products.h"
#include "norm_slack.h"

namespace spamm::cpu {

// losses[j] += the largest products of norms stored as `a` > 0 and b[j], where they are skipped.
SPAMM_INLINE void add_losses_of(double a, const double* b, const double* skip_norm_b, int64_t nb,
                                double tau, double* __restrict losses, Step<double>& step) {
  constexpr double kRounding = std::numeric_limits<double>::denorm_min();  // of what underflows
  const double loss_a = kernels::at_most(a);
  Step<double> own;
  for (int64_t j = 0; j < nb; ++j) {
    const double loss = b[j] > 0 ? loss_a * kernels::at_most(b[j]) + kRounding : 0.0;
    const double product = a * skip_norm_b[j];
    losses[j] += product < tau ? loss : 0.0;
    own.include(product, product < tau);
  }
  step = step.joined(step, own);
}

// In two loops, since one with both types is vectorised badly. `a` is finite.
SPAMM_INLINE void add_losses_of(float a, const float* b, const float* skip_norm_b, int64_t nb,
                                float tau, double* __restrict losses, Step<float>& step) {
  constexpr int64_t kColumns = 64;
  const double wide_a = kernels::at_most(a);
  Step<float> own;
  for (int64_t first = 0; first < nb; first += kColumns) {
    const int64_t size = std::min(kColumns, nb - first);
    float lost[kColumns];
    for (int64_t j = 0; j < size; ++j) {
      const float product = a * skip_norm_b[first + j];
      lost[j] = product < tau ? kernels::at_most(b[first + j]) : 0.0f;
      own.include(product, product < tau);
    }
    for (int64_t j = 0; j < size; ++j) losses[first + j] += wide_a * lost[j];
  }
  step = step.joined(step, own);
}

// losses[j] += the norm products of the skipped k in column j.
template <class N>
SPAMM_CPU_CLONES void add_losses(const N* a, const N* b, const N* skip_norm_b, int64_t kb,
                                 int64_t nb, N tau, double* __restrict losses, Step<N>& step) {
  for (int64_t k = 0; k < kb; ++k, b += nb, skip_norm_b += nb) {
    // No product of an infinity or NaN is skipped.
    if (std::isfinite(a[k]) && a[k] > 0) add_losses_of(a[k], b, skip_norm_b, nb, tau, losses, step);
  }
}

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

// The step of a threshold. Its cost is the error bound, with the rounding of norms and sums here.
template <class N>
Step<N> step_at(const Maps<N>& maps, const N* skip_norm_b, N tau) {
  const int64_t rows = maps.batches * maps.mb;
  std::vector<double> row_bounds(rows);
  const auto add_rows = [&](int64_t from, int64_t to, Step<N> step) {
    std::vector<double> losses(maps.nb);
    for (int64_t row = from; row < to; ++row) {
      const N* b = maps.b_for_row(row);
      std::fill(losses.begin(), losses.end(), 0.0);
      add_losses(maps.row_of_a(row), b, skip_norm_b + (b - maps.b), maps.kb, maps.nb, tau,
                 losses.data(), step);
      row_bounds[row] = kernels::at_most(norm_of(losses.data(), maps.nb));
    }
    return step;
  };
  Step<N> step =
      at::parallel_reduce(0, rows, grain(maps.kb * maps.nb), Step<N>(), add_rows, Step<N>::joined);
  step.cost = bound_of_rows<N>(row_bounds, maps.kb + maps.nb + rows);
  return step;
}

// ---- Operators ---------------------------------------------------------------------------------

Tensor find_tau(FindTauArguments& x) {
  check_find_tau(x);
  const Tensor skip_norms = x.skip_norm_b.value_or(x.norm_b).contiguous();
  return dispatch_norms(x.norm_a, [&](auto type) {
    using N = decltype(type);
    const Maps<N> maps(x.norm_a, x.valid_ratio ? skip_norms : x.norm_b);
    const double places =
        static_cast<double>(maps.batches) * static_cast<double>(maps.mb * maps.nb);
    const N tau = x.valid_ratio ? find_tau_of(product_counter(maps), *x.valid_ratio)
                                : find_tau_for_error_of<N>(
                                      maps.owner_a, maps.owner_b, *x.max_error,
                                      std::sqrt(places) * static_cast<double>(maps.kb), [&](N at) {
                                        return step_at(maps, skip_norms.const_data_ptr<N>(), at);
                                      });
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
    const N* const skip = skip_norms.const_data_ptr<N>();
    const auto bound = static_cast<N>(step_at(maps, skip, threshold_value<N>(tau)).cost);
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
