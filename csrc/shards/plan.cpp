#include "shards/plan.h"

#include <algorithm>
#include <numeric>

#include "block.h"

namespace spamm::shards {
namespace {

constexpr int64_t kStages = 16;
constexpr int64_t kLeastColumns = 2048;   // narrower stages have too few tiles to fill a device
constexpr int64_t kColumnMultiple = 256;  // a multiple of every block and every tile

// The work before each group of `multiple` block rows, and that of all groups at the end.
std::vector<int64_t> work_before_groups(std::span<const int64_t> work, int64_t multiple) {
  std::vector<int64_t> before = {0};
  const auto rows = static_cast<int64_t>(work.size());
  for (int64_t row = 0; row < rows; row += multiple) {
    const auto group = work.subspan(row, std::min(multiple, rows - row));
    before.push_back(std::accumulate(group.begin(), group.end(), before.back()));
  }
  return before;
}

// Where a part ends that begins at group `first` and takes groups while its work is at most
// `limit`.
int64_t end_of_part(const std::vector<int64_t>& before, int64_t first, int64_t limit) {
  const auto end =
      std::upper_bound(before.begin() + first, before.end(), before[first] + limit) - 1;
  return end - before.begin();
}

bool fits(const std::vector<int64_t>& before, int64_t parts, int64_t limit) {
  const auto groups = static_cast<int64_t>(before.size()) - 1;
  int64_t group = 0;
  for (int64_t part = 0; part < parts && group < groups; ++part)
    group = end_of_part(before, group, limit);
  return group == groups;
}

// The smallest work that the largest part must have.
int64_t smallest_limit(const std::vector<int64_t>& before, int64_t parts) {
  int64_t low = 0, high = before.back();  // `high` always fits
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (fits(before, parts, middle))
      high = middle;
    else
      low = middle + 1;
  }
  return high;
}

}  // namespace

std::vector<int64_t> row_cuts(std::span<const int64_t> work, int64_t parts, int64_t multiple) {
  const auto before = work_before_groups(work, multiple);
  const auto groups = static_cast<int64_t>(before.size()) - 1;
  const int64_t limit = smallest_limit(before, parts);
  std::vector<int64_t> cuts = {0};
  for (int64_t part = 0, group = 0; part < parts; ++part) {
    // Leaves a group for each later part, which keeps every part within the limit.
    const int64_t for_later = std::min(groups, std::max(groups - (parts - part - 1), group + 1));
    group = std::min(end_of_part(before, group, limit), for_later);
    cuts.push_back(std::min<int64_t>(group * multiple, work.size()));
  }
  return cuts;
}

std::vector<Run> runs_of(std::span<const bool> need, int64_t from, int64_t to) {
  std::vector<Run> runs;
  for (int64_t row = from; row < to; ++row) {
    if (!need[row]) continue;
    if (!runs.empty() && runs.back().first + runs.back().count == row)
      ++runs.back().count;
    else
      runs.push_back({row, 1});
  }
  return runs;
}

std::vector<Run> join_runs(std::vector<Run> runs, size_t most) {
  if (runs.size() <= most) return runs;
  // By the gap before each run but the first. The widest most - 1 gaps stay.
  std::vector<size_t> order(runs.size() - 1);
  std::iota(order.begin(), order.end(), 1);
  const auto gap = [&](size_t i) { return runs[i].first - runs[i - 1].first - runs[i - 1].count; };
  std::ranges::stable_sort(order, [&](size_t x, size_t y) { return gap(x) > gap(y); });
  std::vector<bool> begins(runs.size(), false);
  begins[0] = true;
  for (size_t i = 0; i + 1 < most; ++i) begins[order[i]] = true;
  std::vector<Run> joined;
  for (size_t i = 0; i < runs.size(); ++i) {
    if (begins[i])
      joined.push_back(runs[i]);
    else
      joined.back().count = runs[i].first + runs[i].count - joined.back().first;
  }
  return joined;
}

int64_t stage_blocks(int64_t block_columns, int64_t block_n) {
  const int64_t sixteenth = blocks_of(block_columns * block_n, kStages);
  const int64_t columns = blocks_of(sixteenth, kColumnMultiple) * kColumnMultiple;
  return std::max(columns, kLeastColumns) / block_n;
}

std::vector<int64_t> stage_order(std::span<const int64_t> needed) {
  std::vector<int64_t> order(needed.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t x, int64_t y) { return needed[x] < needed[y]; });
  return order;
}

}  // namespace spamm::shards
