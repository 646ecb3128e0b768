// Cuts for operands on one device. No device.
#include <algorithm>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "shards/plan.h"
#include "support.h"

namespace spamm::shards {
namespace {

constexpr int64_t kDelay = 4000;

// By the definition: what the part with groups [first, last) costs.
int64_t cost_of(const std::vector<GroupCost>& groups, int64_t first, int64_t last, bool is_home) {
  if (first == last) return 0;
  int64_t multiply = 0, fetch_a = 0, fetch_b = 0;
  for (int64_t i = first; i < last; ++i) {
    multiply += groups[i].multiply;
    fetch_a += groups[i].fetch_a;
    fetch_b += i == first ? groups[i].fetch_b : groups[i].fetch_more_b;
  }
  return is_home ? multiply : kDelay + fetch_b + std::max(multiply, fetch_a);
}

// The cost of the slowest part, over all cuts.
int64_t fastest(const std::vector<GroupCost>& groups, int64_t parts, int64_t home, int64_t part = 0,
                int64_t first = 0) {
  const auto count = static_cast<int64_t>(groups.size());
  if (part + 1 == parts) return cost_of(groups, first, count, part == home);
  int64_t least = std::numeric_limits<int64_t>::max();
  for (int64_t last = first; last <= count; ++last) {
    least = std::min(least, std::max(cost_of(groups, first, last, part == home),
                                     fastest(groups, parts, home, part + 1, last)));
  }
  return least;
}

TEST(RemoteCuts, AreTheFastestToAThousandth) {
  std::mt19937 random(1);
  std::uniform_int_distribution<int64_t> number(0, 10000);
  for (int run = 0; run < 200; ++run) {
    const int64_t parts = 1 + run % 3, home = run % (parts + 1) - (run % 2);
    std::vector<GroupCost> groups;
    for (int i = 0; i < 1 + run % 9; ++i) {
      // A group needs no more of B than the one before it and what it needs more than that one.
      const int64_t more = number(random), before = groups.empty() ? 0 : groups.back().fetch_b;
      const int64_t all_b = more + number(random) % (before + 1);
      groups.push_back({number(random) + 1, number(random), all_b, more});
    }
    const auto cuts = cut_for_home(groups, parts, home, kDelay);
    ASSERT_EQ(cuts.size(), parts + 1);
    EXPECT_EQ(cuts.front(), 0);
    EXPECT_EQ(cuts.back(), groups.size());
    EXPECT_TRUE(std::ranges::is_sorted(cuts));
    int64_t slowest = 0;
    for (int64_t p = 0; p < parts; ++p) {
      slowest = std::max(slowest, cost_of(groups, cuts[p], cuts[p + 1], p == home));
    }
    const int64_t highest = cost_of(groups, 0, static_cast<int64_t>(groups.size()), false);
    EXPECT_LE(slowest, fastest(groups, parts, home) + highest / 1000 + 1) << run;
  }
}

TEST(RemoteCuts, GiveNothingToAPartThatStartsTooLate) {
  const std::vector<GroupCost> groups(8, {.multiply = 100, .fetch_a = 1, .fetch_b = 1});
  EXPECT_EQ(cut_for_home(groups, 2, 0, 800), (std::vector<int64_t>{0, 8, 8}));
  EXPECT_EQ(cut_for_home(groups, 2, 0, 10)[1], 4);
}

TEST(RemoteCuts, OfNoGroupsAreEmpty) {
  EXPECT_EQ(cut_for_home({}, 2, 0, kDelay), (std::vector<int64_t>{0, 0, 0}));
}

}  // namespace
}  // namespace spamm::shards
