// Norm maps as the CPU's threshold ops read them, and searches by counts of valid block products.
//
// A search narrows the bit patterns of thresholds, which have the order of the numbers, from one
// product of norms to another. To count the products that a threshold skips, the norms of A's
// column k and of B's row k are sorted once for each k. Two pointers then count in O(M + N),
// because rounded products are monotonic in their factors.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <limits>
#include <type_traits>
#include <utility>
#include <vector>

#include "cpu/common/machine.h"
#include "cpu/norm_map/strip_norms.h"
#include "norm_slack.h"

namespace spamm::cpu {

inline constexpr int64_t kStepsPerTask = 32 << 10;  // with fewer, starting a thread does not pay

// The number of items in a task, if an item takes `steps` steps.
inline int64_t grain(int64_t steps) {
  return std::max<int64_t>(1, kStepsPerTask / std::max<int64_t>(1, steps));
}

// Contiguous norm maps of a batch of products: A's (batches, MB, KB) and B's (batches, KB, NB).
template <class N>
struct Maps {
  at::Tensor owner_a, owner_b;
  const N *a, *b;
  int64_t batches, mb, kb, nb;

  Maps(const at::Tensor& norm_a, const at::Tensor& norm_b)
      : owner_a(norm_a.contiguous()),
        owner_b(norm_b.contiguous()),
        a(owner_a.const_data_ptr<N>()),
        b(owner_b.const_data_ptr<N>()),
        batches(c10::multiply_integers(norm_a.sizes().slice(0, norm_a.dim() - 2))),
        mb(norm_a.size(-2)),
        kb(norm_a.size(-1)),
        nb(norm_b.size(-1)) {}

  const N* row_of_a(int64_t row) const { return a + row * kb; }  // batch * mb + i
  const N* b_for_row(int64_t row) const { return b + row / mb * kb * nb; }
};

// function(a number of the maps' type).
template <class Function>
auto dispatch_norms(const at::Tensor& norm_a, const Function& function) {
  return norm_a.scalar_type() == at::kDouble ? function(double()) : function(float());
}

// Products of norms have the order of their bit patterns.
template <class N>
using BitsOf = std::conditional_t<sizeof(N) == 4, int32_t, int64_t>;
template <class N>
constexpr BitsOf<N> kInfinity = std::bit_cast<BitsOf<N>>(std::numeric_limits<N>::infinity());

// Thresholds that skip the same products: those above `last`, the largest one that is skipped, up
// to `next`, the least one that is not.
template <class N>
struct Step {
  BitsOf<N> last = 0, next = kInfinity<N>;
  double cost = 0;  // of what is skipped

  SPAMM_INLINE void include(N product, bool is_skipped) {
    const auto bits = std::bit_cast<BitsOf<N>>(product);
    // As values, not as references: a compiler vectorises no choice between addresses.
    const BitsOf<N> skipped = is_skipped ? bits : 0, kept = is_skipped ? kInfinity<N> : bits;
    last = std::max(last, skipped);
    next = std::min(next, kept);
  }
  static Step joined(const Step& x, const Step& y) {
    return {std::max(x.last, y.last), std::min(x.next, y.next), x.cost + y.cost};
  }
};

// The last step whose cost is at most `most`, and the one after it. Their costs ascend from 0 on.
// step_at(tau) finds that of a threshold. It is asked for the thresholds `first`, then for those at
// which the cost would pass `most` if it were a power of the threshold. The end that stays when the
// other one moves again counts half each time (the Illinois method).
template <class N, class StepAt>
std::pair<Step<N>, Step<N>> steps_around(double most, std::initializer_list<double> first,
                                         const StepAt& step_at) {
  using Bits = BitsOf<N>;
  constexpr double kNever = std::numeric_limits<double>::infinity();
  Step<N> within{0, 0, 0}, beyond{kInfinity<N>, kInfinity<N>, kNever};
  int streak = 0;  // of answers within, or of those beyond, which count down
  const auto ask = [&](Bits threshold) {
    if (threshold <= within.next || threshold > beyond.last) return;
    Step<N> step = step_at(std::bit_cast<N>(threshold));
    step.next = std::max(step.next, threshold);
    if (step.cost <= most) {
      step.next = std::min(step.next, beyond.last);
      within = step;
      streak = std::max(streak, 0) + 1;
    } else {
      step.last = std::clamp(step.last, within.next, threshold - 1);
      beyond = step;
      streak = std::min(streak, 0) - 1;
    }
  };
  for (const double threshold : first) ask(std::bit_cast<Bits>(static_cast<N>(threshold)));
  while (within.next < beyond.last) {
    const Bits width = beyond.last - within.next;
    Bits distance = width / 2;
    if (within.cost > 0 && beyond.cost < kNever && std::abs(streak) < 8) {
      const double aim = std::log(most);
      const double low = std::ldexp(aim - std::log(within.cost), std::min(streak + 1, 0));
      const double high = std::ldexp(std::log(beyond.cost) - aim, std::min(1 - streak, 0));
      const double share = low / std::max(low + high, std::numeric_limits<double>::min());
      distance = static_cast<Bits>(share * static_cast<double>(width));
    }
    ask(within.next + std::clamp<Bits>(distance, 1, width));
  }
  return {within, beyond};
}

// Lists of norms, one behind the other: list p is norms[first[p]] to norms[first[p + 1] - 1].
template <class N>
struct NormLists {
  std::vector<N> norms;
  std::vector<int64_t> first;
};

// Counts the valid block products of all k and batches at a threshold. List p of A holds the norms
// of a column k, list p of B those of row k.
template <class N>
class ProductCounter {
 public:
  ProductCounter(NormLists<N> a, NormLists<N> b)
      : a_(std::move(a)), b_(std::move(b)), finite_(a_.first.size() - 1) {
    at::parallel_for(0, pairs(), grain(8 * mean_steps()), [&](int64_t from, int64_t to) {
      for (int64_t p = from; p < to; ++p) finite_[p] = {sort_finite(a_, p), sort_finite(b_, p)};
    });
    for (int64_t p = 0; p < pairs(); ++p) total_ += size(a_, p) * size(b_, p);
  }

  int64_t total() const { return total_; }

  // The step of a threshold. Its cost is the number of products that it skips.
  Step<N> step_at(N tau) const {
    return at::parallel_reduce(
        0, pairs(), grain(mean_steps()), Step<N>(),
        [&](int64_t from, int64_t to, Step<N> step) {
          for (int64_t p = from; p < to; ++p) add_pair(p, tau, step);
          return step;
        },
        Step<N>::joined);
  }

 private:
  struct Finite {
    int64_t a, b;
  };

  int64_t pairs() const { return static_cast<int64_t>(finite_.size()); }
  int64_t mean_steps() const {
    const auto norms = static_cast<int64_t>(a_.norms.size() + b_.norms.size());
    return norms / std::max<int64_t>(1, pairs());
  }
  static int64_t size(const NormLists<N>& lists, int64_t p) {
    return lists.first[p + 1] - lists.first[p];
  }

  // Moves the finite norms to the front in ascending order. Returns their number.
  static int64_t sort_finite(NormLists<N>& lists, int64_t p) {
    N* const norms = lists.norms.data() + lists.first[p];
    N* end = std::partition(norms, norms + size(lists, p), [](N x) { return std::isfinite(x); });
    std::sort(norms, end);
    return end - norms;
  }

  // Products with a norm that is not finite are NaN or infinite, hence valid at any threshold.
  void add_pair(int64_t p, N tau, Step<N>& step) const {
    const N *a = a_.norms.data() + a_.first[p], *b = b_.norms.data() + b_.first[p];
    const auto [finite_a, finite_b] = finite_[p];
    int64_t skipped = 0;
    for (int64_t i = 0, j = finite_b; i < finite_a; ++i) {
      while (j > 0 && !(a[i] * b[j - 1] < tau)) --j;
      skipped += j;
      if (j > 0) step.include(a[i] * b[j - 1], true);
      if (j < finite_b) step.include(a[i] * b[j], false);
    }
    step.cost += static_cast<double>(skipped);
  }

  NormLists<N> a_, b_;  // each list sorted
  std::vector<Finite> finite_;
  int64_t total_ = 0;
};

// The threshold whose share of valid products is nearest to `valid_ratio`.
template <class N>
N find_tau_of(const ProductCounter<N>& products, double valid_ratio) {
  const auto total = static_cast<double>(products.total());
  if (total == 0) return 0;
  const double target = valid_ratio * total;
  const auto [within, beyond] =
      steps_around<N>(total - std::ceil(target), {}, [&](N tau) { return products.step_at(tau); });
  // The counts of valid products that are nearest to the target: not below it, and below it.
  const double upper = total - within.cost, lower = total - beyond.cost;
  const bool is_lower_nearer = target - lower < upper - target;
  return std::bit_cast<N>(is_lower_nearer ? beyond.next : within.next);
}

// ---- The bound ---------------------------------------------------------------------------------

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

// At least `x`.
template <class N>
N rounded_up(double x) {
  const N rounded = static_cast<N>(x);
  return rounded < x ? std::nextafter(rounded, std::numeric_limits<N>::infinity()) : rounded;
}

// The error bound, rounded up, with the rounding of norms and of sums of at most `additions` terms.
template <class N>
N bound_of_rows(const std::vector<double>& row_bounds, int64_t additions) {
  const double slack = kernels::kNormSlack<N> +
                       static_cast<double>(additions) * std::numeric_limits<double>::epsilon();
  const double root =
      kernels::at_most(norm_of(row_bounds.data(), static_cast<int64_t>(row_bounds.size())));
  return rounded_up<N>(kernels::at_most(root * (1 + slack)));
}

// The least norm of a matrix whose blocks have these norms.
template <class N>
double least_norm(const at::Tensor& norms) {
  return norm_of(norms.const_data_ptr<N>(), norms.numel(),
                 [](N x) { return kernels::at_least(x); });
}

// The largest threshold whose bound, the cost of step_at(tau), is at most max_error * norm(A) *
// norm(B), from contiguous norms. The bound is at most `spread` if each product loses 1.
template <class N, class StepAt>
N find_tau_for_error_of(const at::Tensor& norms_a, const at::Tensor& norms_b, double max_error,
                        double spread, const StepAt& step_at) {
  const double norm_a = least_norm<N>(norms_a), norm_b = least_norm<N>(norms_b);
  const double limit = kernels::largest_bound<N>(max_error, norm_a, norm_b);
  constexpr N kAll = std::numeric_limits<N>::infinity();
  if (!std::isfinite(limit)) return kernels::may_skip_all(max_error, norm_a, norm_b) ? kAll : N(0);
  return std::bit_cast<N>(steps_around<N>(limit, {limit, limit / spread}, step_at).first.next);
}

}  // namespace spamm::cpu
