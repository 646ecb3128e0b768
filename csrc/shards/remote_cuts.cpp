#include "shards/remote_cuts.h"

#include <algorithm>

namespace spamm::shards {
namespace {

class Costs {
 public:
  Costs(std::span<const GroupCost> groups, int64_t delay)
      : groups_(groups), delay_(delay), before_(1) {
    for (const GroupCost& group : groups) {
      const GroupCost& sum = before_.back();
      before_.push_back({sum.multiply + group.multiply, sum.fetch_a + group.fetch_a, 0,
                         sum.fetch_more_b + group.fetch_more_b});
    }
  }

  int64_t count() const { return static_cast<int64_t>(groups_.size()); }

  // Of the part with groups [first, last).
  int64_t of(int64_t first, int64_t last, bool is_home) const {
    if (first == last) return 0;
    const GroupCost &begin = before_[first], &end = before_[last];
    const int64_t multiply = end.multiply - begin.multiply;
    if (is_home) return multiply;
    const int64_t more_b = end.fetch_more_b - before_[first + 1].fetch_more_b;
    return delay_ + groups_[first].fetch_b + more_b +
           std::max(multiply, end.fetch_a - begin.fetch_a);
  }

 private:
  std::span<const GroupCost> groups_;
  int64_t delay_;
  std::vector<GroupCost> before_;  // sums
};

// Each part takes as many groups as it can in `limit`. The last cut may lie before the last group.
std::vector<int64_t> cut_within(const Costs& costs, int64_t parts, int64_t home, int64_t limit) {
  std::vector<int64_t> cuts = {0};
  for (int64_t part = 0; part < parts; ++part) {
    int64_t low = cuts.back(), high = costs.count();
    while (low < high) {
      const int64_t middle = (low + high + 1) / 2;
      if (costs.of(cuts.back(), middle, part == home) <= limit)
        low = middle;
      else
        high = middle - 1;
    }
    cuts.push_back(low);
  }
  return cuts;
}

}  // namespace

std::vector<int64_t> cut_for_home(std::span<const GroupCost> groups, int64_t parts, int64_t home,
                                  int64_t delay) {
  constexpr int64_t kPrecision = 1000;
  const Costs costs(groups, delay);
  int64_t low = 0, high = costs.of(0, costs.count(), /*is_home=*/false);  // `high` always fits
  while (high - low > high / kPrecision) {
    const int64_t middle = low + (high - low) / 2;
    if (cut_within(costs, parts, home, middle).back() == costs.count())
      high = middle;
    else
      low = middle + 1;
  }
  return cut_within(costs, parts, home, high);
}

}  // namespace spamm::shards
