// The plan of a product over several devices: plain numbers, no device.
#include "shards/plan.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <numeric>
#include <random>
#include <span>
#include <vector>

#include "environment.h"
#include "support.h"

namespace spamm::shards {
namespace {

using Numbers = std::vector<int64_t>;

int64_t work_of(const Numbers& work, int64_t from, int64_t to) {
  return std::accumulate(work.begin() + from, work.begin() + to, int64_t{0});
}

int64_t largest_part(const Numbers& work, const Numbers& cuts) {
  int64_t largest = 0;
  for (size_t p = 0; p + 1 < cuts.size(); ++p)
    largest = std::max(largest, work_of(work, cuts[p], cuts[p + 1]));
  return largest;
}

// The smallest work of the largest of `parts` parts of the rows from `first` on, over all cuts.
int64_t smallest_largest_part(const Numbers& work, int64_t parts, int64_t multiple,
                              int64_t first = 0) {
  const auto rows = static_cast<int64_t>(work.size());
  if (parts == 1) return work_of(work, first, rows);
  int64_t smallest = std::numeric_limits<int64_t>::max();
  for (int64_t cut = first; cut < rows + multiple; cut += multiple) {
    const int64_t end = std::min(cut, rows);
    const int64_t rest = smallest_largest_part(work, parts - 1, multiple, end);
    smallest = std::min(smallest, std::max(work_of(work, first, end), rest));
  }
  return smallest;
}

void expect_cuts(const Numbers& work, int64_t parts, int64_t multiple) {
  SCOPED_TRACE(::testing::Message() << "work " << ::testing::PrintToString(work) << ", parts "
                                    << parts << ", multiple " << multiple);
  const auto rows = static_cast<int64_t>(work.size());
  const Numbers cuts = row_cuts(work, parts, multiple);
  ASSERT_EQ(cuts.size(), parts + 1);
  EXPECT_EQ(cuts.front(), 0);
  EXPECT_EQ(cuts.back(), rows);
  EXPECT_TRUE(std::ranges::is_sorted(cuts));
  for (const int64_t cut : cuts) EXPECT_TRUE(cut % multiple == 0 || cut == rows) << cut;
  EXPECT_EQ(largest_part(work, cuts), smallest_largest_part(work, parts, multiple));
  const int64_t groups = (rows + multiple - 1) / multiple;
  for (int64_t p = 0; p < std::min(parts, groups); ++p) EXPECT_LT(cuts[p], cuts[p + 1]) << p;
}

TEST(RowCuts, AreOptimalAmongAllCuts) {
  std::mt19937 random(0);
  for (int64_t rows = 0; rows <= 12; ++rows) {
    for (int64_t parts = 1; parts <= 4; ++parts) {
      for (const int64_t multiple : {1, 2, 4}) {
        // Even work, work with many zeros, and work of very different sizes.
        for (const int64_t most : {0, 1, 20, 1'000'000}) {
          Numbers work(rows);
          std::ranges::generate(work, [&] {
            return std::uniform_int_distribution<int64_t>(most == 20 ? 15 : 0, most)(random);
          });
          expect_cuts(work, parts, multiple);
        }
      }
    }
  }
  const Numbers large(3, int64_t{1} << 60);  // nothing overflows
  EXPECT_EQ(row_cuts(large, 3, 1), (Numbers{0, 1, 2, 3}));
}

TEST(Runs, RebuildTheNeedAndDoNotTouch) {
  constexpr int64_t kRows = 9;
  for (int bits = 0; bits < 1 << kRows; ++bits) {
    std::array<bool, kRows> need;
    for (int64_t row = 0; row < kRows; ++row) need[row] = bits >> row & 1;
    for (int64_t from = 0; from <= kRows; ++from) {
      for (int64_t to = from; to <= kRows; ++to) {
        std::array<bool, kRows> rebuilt = {};
        int64_t free = from;  // where the next run may begin
        for (const shards::Run& run : runs_of(need, from, to)) {
          ASSERT_GE(run.first, free);
          ASSERT_GT(run.count, 0);
          ASSERT_LE(run.first + run.count, to);
          std::fill_n(rebuilt.begin() + run.first, run.count, true);
          free = run.first + run.count + 1;
        }
        for (int64_t row = 0; row < kRows; ++row)
          ASSERT_EQ(rebuilt[row], need[row] && from <= row && row < to);
      }
    }
  }
}

TEST(Runs, JoinAtTheSmallestGaps) {
  std::array<bool, 16> need;  // gaps of 1, 5 and 2
  for (size_t row = 0; row < need.size(); ++row)
    need[row] = std::ranges::count(Numbers{2, 4, 5, 6, 7, 8, 10, 11}, row) == 0;
  using Expected = std::vector<std::array<int64_t, 2>>;
  const auto joined = [&](size_t most) {
    Expected result;
    for (const shards::Run& run : runs_of(need, 0, 16, most))
      result.push_back({run.first, run.count});
    return result;
  };
  EXPECT_EQ(joined(9), (Expected{{0, 2}, {3, 1}, {9, 1}, {12, 4}}));
  EXPECT_EQ(joined(3), (Expected{{0, 4}, {9, 1}, {12, 4}}));
  EXPECT_EQ(joined(2), (Expected{{0, 4}, {9, 7}}));
  EXPECT_EQ(joined(1), (Expected{{0, 16}}));
  EXPECT_TRUE(runs_of(need, 4, 8, 1).empty());
}

TEST(Stages, HaveASixteenthOfTheColumnsAndAtLeast2048) {
  for (const int64_t edge : {32, 64, 128}) {
    for (const int64_t columns : {0, 1, 100, 2048, 2049, 8192, 32768, 32769, 50000, 100'000}) {
      const int64_t blocks = (columns + edge - 1) / edge;
      const int64_t stage = stage_blocks(blocks, edge);
      EXPECT_GE(stage * edge, 2048);
      EXPECT_EQ(stage * edge % 256, 0);
      EXPECT_LE(stage * 16 * edge, std::max<int64_t>(16 * 2048, blocks * edge + 16 * 256));
      EXPECT_GE(stage * 16, blocks);
    }
  }
  EXPECT_EQ(stage_blocks(513, 64), 36);  // 32832 columns: 15 stages of 2304 hold them
}

// ---- Cuts for operands on one device ------------------------------------------------------------

constexpr int64_t kDelay = 4000;

// By the definition: what the part with groups [first, last) costs, one of `remote` that fetch
// unless it is the home's.
int64_t cost_of(const std::vector<GroupCost>& groups, int64_t first, int64_t last, bool is_home,
                int64_t remote) {
  if (first == last) return 0;
  int64_t multiply = 0, fetch_a = 0, fetch_b = 0;
  for (int64_t i = first; i < last; ++i) {
    multiply += groups[i].multiply;
    fetch_a += groups[i].fetch_a;
    fetch_b += i == first ? groups[i].fetch_b : groups[i].fetch_more_b;
  }
  return is_home ? multiply : kDelay + remote * fetch_a + std::max(multiply, remote * fetch_b);
}

int64_t remote_of(int64_t parts, int64_t home) {
  return parts - (0 <= home && home < parts ? 1 : 0);
}

// The cost of the slowest part, over all cuts for so many parts.
int64_t fastest(const std::vector<GroupCost>& groups, int64_t parts, int64_t home, int64_t part = 0,
                int64_t first = 0) {
  const auto count = static_cast<int64_t>(groups.size());
  const int64_t remote = remote_of(parts, home);
  if (part + 1 == parts) return cost_of(groups, first, count, part == home, remote);
  int64_t least = std::numeric_limits<int64_t>::max();
  for (int64_t last = first; last <= count; ++last) {
    least = std::min(least, std::max(cost_of(groups, first, last, part == home, remote),
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
    int64_t remote = 0, slowest = 0, least = std::numeric_limits<int64_t>::max();
    for (int64_t p = 0; p < parts; ++p) {
      remote += p != home && cuts[p] < cuts[p + 1];
      least = std::min(least, fastest(groups, p + 1, home));
    }
    for (int64_t p = 0; p < parts; ++p) {
      slowest = std::max(slowest, cost_of(groups, cuts[p], cuts[p + 1], p == home, remote));
    }
    const int64_t highest = cost_of(groups, 0, std::ssize(groups), false, parts);
    EXPECT_LE(slowest, least + highest / 1000 + 1) << run;
  }
}

TEST(RemoteCuts, LeavePartsIdleThatWouldSlowOthers) {
  using Cuts = std::vector<int64_t>;
  std::vector<GroupCost> groups(8,
                                {.multiply = 100, .fetch_a = 1, .fetch_b = 1, .fetch_more_b = 0});
  EXPECT_EQ(cut_for_home(groups, 2, 0, 800), (Cuts{0, 8, 8}));  // it would start too late
  EXPECT_EQ(cut_for_home(groups, 2, 0, 10)[1], 4);
  groups.assign(8, {.multiply = 100, .fetch_a = 300, .fetch_b = 0, .fetch_more_b = 0});
  EXPECT_EQ(cut_for_home(groups, 4, 0, 0), (Cuts{0, 7, 8, 8, 8}));
  EXPECT_EQ(cut_for_home({}, 2, 0, kDelay), (Cuts{0, 0, 0}));
}

TEST(Variables, AreZeroOrOne) {
  const auto is_one = [](const char* value) {
    setenv("SPAMM_TORCH_ALL_DEVICES", value, 1);
    return is_set("SPAMM_TORCH_ALL_DEVICES");
  };
  EXPECT_FALSE(is_one(""));
  EXPECT_FALSE(is_one("0"));
  EXPECT_TRUE(is_one("1"));
  EXPECT_THROW(is_one("yes"), c10::ValueError);
  unsetenv("SPAMM_TORCH_ALL_DEVICES");
}

}  // namespace
}  // namespace spamm::shards
