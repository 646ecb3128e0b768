#include "shards/plan.h"

#include <functional>
#include <numeric>

#include "arguments.h"
#include "block.h"
#include "checks.h"
#include "spamm/spamm.h"

namespace spamm::shards {
namespace {

// parts + 1 numbers of groups, which make the slowest part as fast as possible, to this share of
// its cost. cost(part, first, last): of the part with groups [first, last); it grows with `last`,
// and no part needs more than `most`.
template <class Cost>
std::vector<int64_t> cut_by_cost(int64_t groups, int64_t parts, int64_t most, int64_t share,
                                 const Cost& cost) {
  // Each part takes as many groups as it can.
  const auto cut_within = [&](int64_t limit) {
    std::vector<int64_t> cuts = {0};
    for (int64_t part = 0; part < parts; ++part) {
      int64_t low = cuts.back(), high = groups;
      while (low < high) {
        const int64_t middle = (low + high + 1) / 2;
        if (cost(part, cuts.back(), middle) <= limit)
          low = middle;
        else
          high = middle - 1;
      }
      cuts.push_back(low);
    }
    return cuts;
  };
  int64_t low = 0, high = most;
  while (high - low > high / share) {
    const int64_t middle = low + (high - low) / 2;
    if (cut_within(middle).back() == groups)
      high = middle;
    else
      low = middle + 1;
  }
  return cut_within(high);
}

}  // namespace

std::vector<int64_t> row_cuts(std::span<const int64_t> work, int64_t parts, int64_t multiple) {
  const auto rows = std::ssize(work);
  std::vector<int64_t> before = {0};  // the work before each group of `multiple` block rows
  for (int64_t row = 0; row < rows; row += multiple) {
    const auto group = work.subspan(row, std::min(multiple, rows - row));
    before.push_back(std::accumulate(group.begin(), group.end(), before.back()));
  }
  const int64_t groups = std::ssize(before) - 1;
  auto cuts = cut_by_cost(
      groups, parts, before.back(), std::numeric_limits<int64_t>::max(),
      [&](int64_t, int64_t first, int64_t last) { return before[last] - before[first]; });
  // Leaves a group for each later part, which keeps every part within the limit.
  for (int64_t part = 0; part < parts; ++part) {
    const int64_t for_later = std::max(groups - (parts - part - 1), cuts[part] + 1);
    cuts[part + 1] = std::min({cuts[part + 1], for_later, groups});
  }
  for (int64_t& cut : cuts) cut = std::min<int64_t>(cut * multiple, rows);
  return cuts;
}

std::vector<int64_t> cut_for_home(std::span<const GroupCost> groups, int64_t parts, int64_t home,
                                  int64_t delay) {
  std::vector<GroupCost> before(1);  // sums
  for (const GroupCost& group : groups) {
    const GroupCost& sum = before.back();
    before.push_back({sum.multiply + group.multiply, sum.fetch_a + group.fetch_a, 0,
                      sum.fetch_more_b + group.fetch_more_b});
  }
  const int64_t count = std::ssize(groups);
  std::vector<int64_t> fastest;  // of the cuts for 1, 2 and more parts
  int64_t least = std::numeric_limits<int64_t>::max();
  for (int64_t used = 1; used <= parts; ++used) {
    const int64_t remote = used - (0 <= home && home < used ? 1 : 0);
    const auto cost = [&](int64_t part, int64_t first, int64_t last) -> int64_t {
      if (first == last) return 0;
      const GroupCost &begin = before[first], &end = before[last];
      const int64_t multiply = end.multiply - begin.multiply;
      if (part == home) return multiply;
      const int64_t more_b = end.fetch_more_b - before[first + 1].fetch_more_b;
      const int64_t fetch_b = groups[first].fetch_b + more_b;
      return delay + remote * (end.fetch_a - begin.fetch_a) + std::max(multiply, remote * fetch_b);
    };
    auto cuts = cut_by_cost(count, used, cost(home + 1, 0, count), /*share=*/1000, cost);
    int64_t slowest = 0;
    for (int64_t part = 0; part < used; ++part) {
      slowest = std::max(slowest, cost(part, cuts[part], cuts[part + 1]));
    }
    if (slowest >= least) continue;
    least = slowest;
    fastest = std::move(cuts);
  }
  fastest.resize(parts + 1, count);
  return fastest;
}

std::vector<Run> runs_of(std::span<const bool> need, int64_t from, int64_t to, size_t most) {
  std::vector<int64_t> steps;  // from each needed row that is not the last to the next
  for (int64_t row = from, last = -1; row < to; ++row) {
    if (!need[row]) continue;
    if (last >= 0) steps.push_back(row - last);
    last = row;
  }
  int64_t widest = 1;  // step within a run
  if (steps.size() >= most) {
    std::ranges::nth_element(steps, steps.begin() + most - 1, std::greater());
    widest = steps[most - 1];
  }
  std::vector<Run> runs;
  for (int64_t row = from; row < to; ++row) {
    if (!need[row]) continue;
    if (!runs.empty() && row - (runs.back().first + runs.back().count - 1) <= widest)
      runs.back().count = row + 1 - runs.back().first;
    else
      runs.push_back({row, 1});
  }
  return runs;
}

int64_t stage_blocks(int64_t block_columns, int64_t block_n) {
  constexpr int64_t kLeast = 2048;    // narrower stages have too few tiles to fill a device
  constexpr int64_t kMultiple = 256;  // of every block and every tile
  const int64_t sixteenth = blocks_of(block_columns * block_n, 16);
  return std::max(blocks_of(sixteenth, kMultiple) * kMultiple, kLeast) / block_n;
}

// ---- From norm maps -----------------------------------------------------------------------------

Tensor in_stages(const Tensor& norm_b, int64_t stage_blocks) {
  const int64_t stages = blocks_of(norm_b.size(1), stage_blocks);
  const int64_t missing = stages * stage_blocks - norm_b.size(1);
  const Tensor whole = missing == 0 ? norm_b : at::constant_pad_nd(norm_b, {0, missing});
  return whole.contiguous().view({norm_b.size(0), stages, stage_blocks});
}

// A unit is needed if its largest norm, times the largest norm in the part's column, is valid:
// rounding is monotone, so exactly then some block product of both is valid. at::amax keeps NaN.
Tensor needed_units(const Tensor& largest_a, const Tensor& norm_b, const Tensor& tau,
                    int64_t stage_blocks) {
  const Tensor largest_b = in_stages(norm_b, stage_blocks).amax(2);
  const Tensor products = largest_a.unsqueeze(2).mul(largest_b);
  return products.lt(tau.to(products.scalar_type())).logical_not_();
}

Tensor row_work(const Tensor& norm_a, const Tensor& norm_b, const Tensor& tau) {
  // Fitted to float16 products on one GPU: time is linear in the valid products, and a product with
  // none of them takes 0.6% of the time of the dense one.
  constexpr int64_t kWorkOfValid = 1000, kWorkOfAny = 6;
  check_norm_maps(norm_a, norm_b);
  TORCH_CHECK(norm_a.dim() == 2, "norm maps must be 2-d: (MB, KB) and (KB, NB); got shapes ",
              norm_a.sizes(), " and ", norm_b.sizes());
  check_tau(tau, norm_a.device());
  return valid_counts(norm_a, norm_b, tau)
      .sum(1, /*keepdim=*/false, at::kLong)
      .mul_(kWorkOfValid)
      .add_(kWorkOfAny * norm_b.numel());
}

namespace {

std::tuple<Tensor, std::vector<int64_t>> row_work_op(const Tensor& norm_a, const Tensor& norm_b,
                                                     const Tensor& tau, int64_t parts,
                                                     int64_t multiple) {
  TORCH_CHECK_VALUE(parts >= 0, "parts must be at least 0; got ", parts);
  TORCH_CHECK_VALUE(multiple > 0, "multiple must be positive; got ", multiple);
  const Tensor work = row_work(norm_a, norm_b, tau);
  if (parts == 0) return {work, {}};
  const Tensor read = work.cpu();
  return {work, row_cuts({read.const_data_ptr<int64_t>(), static_cast<size_t>(read.numel())}, parts,
                         multiple)};
}

}  // namespace

TORCH_LIBRARY_IMPL(spamm_torch, CompositeExplicitAutograd, m) { m.impl("row_work", &row_work_op); }

}  // namespace spamm::shards
