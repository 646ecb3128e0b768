// Counts of norm products by their keys, on the CPU. Each product is formed and counted.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <bit>
#include <functional>
#include <limits>
#include <type_traits>
#include <vector>

#include "checks.h"
#include "cpu/common/clones.h"
#include "cpu/threshold/maps.h"

namespace spamm::cpu {
namespace {

using at::Tensor;

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

TORCH_LIBRARY_IMPL(spamm_torch, CPU, m) { m.impl("product_histogram", &product_histogram); }

}  // namespace spamm::cpu
