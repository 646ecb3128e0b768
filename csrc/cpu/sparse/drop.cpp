// bsr_drop on CPUs.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/tensor.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "checks.h"
#include "cpu/threshold/bound.h"
#include "cpu/threshold/maps.h"
#include "norm_slack.h"
#include "sparse/csr.h"

namespace spamm::cpu {
namespace {

using at::Tensor;

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
    const double square = x / most * (x / most);
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
      const auto whole_of = [](const Tensor& norms) {
        const Tensor all = norms.contiguous();
        return norm_of(all.const_data_ptr<N>(), all.numel(), [](N x) { return double{x}; });
      };
      const double whole = whole_of(*x.norm_a) * whole_of(*x.norm_b);
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
          gone.push_back(norms[e]);
        } else {
          numbers.push_back(e);
          if (x.values && pattern.col[e] == i)
            trace += (*x.values)[e].diagonal().sum(at::kDouble).item<double>();
        }
      }
    }
    const auto count = static_cast<int64_t>(numbers.size());
    crow.mutable_data_ptr<int64_t>()[pattern.rows] = count;
    const Tensor col = at::empty({count}, index), places = at::empty({count}, index);
    const Tensor kept = at::empty({count}, owner.options());
    for (int64_t i = 0; i < count; ++i) {
      col.mutable_data_ptr<int64_t>()[i] = pattern.col[numbers[i]];
      places.mutable_data_ptr<int64_t>()[i] = numbers[i];
      kept.mutable_data_ptr<N>()[i] = norms[numbers[i]];
    }
    const double lost = norm_of(gone.data(), static_cast<int64_t>(gone.size()));
    const N bound = rounded_up<N>(lost * (1 + 2 * kernels::kNormSlack<N>));
    Tensor sums = at::empty({0}, owner.options().dtype(at::kDouble));
    if (x.values) sums = at::tensor({trace, norm_of(kept.const_data_ptr<N>(), count)}, at::kDouble);
    return {crow, col, kept, places, at::scalar_tensor(bound, owner.options()), sums};
  });
}

}  // namespace

TORCH_LIBRARY_IMPL(spamm_torch, CPU, m) { m.impl("bsr_drop", boxed<&bsr_drop>()); }

}  // namespace spamm::cpu
