// Thresholds, histograms, valid counts and error bounds on the CPU. The searches for tau are exact.
// For a maximum error, a faster search is tried first and its result checked.
#include "threshold.h"

#include <bit>
#include <functional>

#include "checks.h"
#include "cpu/common/machine.h"
#include "cpu/threshold/bound.h"
#include "cpu/threshold/error_search.h"
#include "cpu/threshold/norm_products.h"
#include "norm_slack.h"

namespace spamm::cpu {
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

template <class N>
using Key = std::conditional_t<sizeof(N) == 4, uint32_t, uint64_t>;

// `count` bins of 2^shift keys each, from key `low` on.
template <class N>
struct KeyBins {
  Key<N> low;
  int shift;
  Key<N> count;
};

// bin_of[j] = the bin of a * b[j], or bins.count if its key is outside of all bins. Returns the
// number of keys above them.
template <class N>
SPAMM_CPU_CLONES int64_t find_bins(N a, const N* b, int64_t size, const KeyBins<N> bins,
                                   Key<N>* __restrict bin_of) {
  constexpr Key<N> kMagnitude = ~Key<N>{0} >> 1;
  constexpr Key<N> kInfinity = std::bit_cast<Key<N>>(std::numeric_limits<N>::infinity());
  int64_t above = 0;
  for (int64_t j = 0; j < size; ++j) {
    const Key<N> bits = std::bit_cast<Key<N>>(a * b[j]) & kMagnitude;
    const Key<N> key = bits < kInfinity ? bits : kInfinity;
    const Key<N> bin = (key - bins.low) >> bins.shift;
    const bool inside = key >= bins.low && bin < bins.count;
    above += key >= bins.low && bin >= bins.count;
    bin_of[j] = inside ? bin : bins.count;
  }
  return above;
}

// Counts in each bin, and above all bins.
template <class N>
std::vector<int64_t> count_products(const Maps<N>& maps, const KeyBins<N>& bins) {
  const std::vector<int64_t> none(bins.count + 1);
  return at::parallel_reduce(
      0, maps.batches * maps.mb, grain(maps.kb * maps.nb), none,
      [&](int64_t from, int64_t to, std::vector<int64_t> counts) {
        std::vector<Key<N>> bin_of(maps.nb);
        for (int64_t row = from; row < to; ++row) {
          const N *a = maps.row_of_a(row), *b = maps.b_for_row(row);
          for (int64_t k = 0; k < maps.kb; ++k, b += maps.nb) {
            counts[bins.count] += find_bins(a[k], b, maps.nb, bins, bin_of.data());
            for (const Key<N> bin : bin_of)
              if (bin < bins.count) ++counts[bin];
          }
        }
        return counts;
      },
      [](std::vector<int64_t> counts, const std::vector<int64_t>& others) {
        std::transform(counts.begin(), counts.end(), others.begin(), counts.begin(), std::plus<>());
        return counts;
      });
}

Tensor product_histogram(const Tensor& norm_a, const Tensor& norm_b, const Tensor& low,
                         int64_t shift, int64_t bins) {
  check_norm_maps(norm_a, norm_b);
  check_key_bins(low, shift, bins, norm_a);
  const Tensor histogram = at::empty({bins + 1}, norm_a.options().dtype(at::kLong));
  dispatch_norms(norm_a, [&](auto type) {
    using N = decltype(type);
    const Maps<N> maps(norm_a, norm_b);
    const KeyBins<N> key_bins{static_cast<Key<N>>(low.item<int64_t>()), static_cast<int>(shift),
                              static_cast<Key<N>>(bins)};
    const auto counts = count_products(maps, key_bins);
    std::copy(counts.begin(), counts.end(), histogram.mutable_data_ptr<int64_t>());
  });
  return histogram;
}

}  // namespace

TORCH_LIBRARY_IMPL(spamm_torch, CPU, m) {
  m.impl("find_tau", boxed<&find_tau>());
  m.impl("valid_counts", &valid_counts);
  m.impl("error_bound", &error_bound);
  m.impl("product_histogram", &product_histogram);
}

}  // namespace spamm::cpu
