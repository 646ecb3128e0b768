// The plan of a product over several devices: which part owns which rows, and in which stages the
// needed blocks of B travel. Plain numbers: no tensor, no device.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace spamm::shards {

// Rows of C are cut at multiples of so many, the height of the kernels' tallest tiles, so that a
// part has no more tiles that stick out than the whole has. A multiple of every block's edge.
inline constexpr int64_t kCutRows = 128;

// Neighbouring needed block rows of B, which one copy moves.
struct Run {
  int64_t first, count;
};

// parts + 1 block-row numbers, from 0 to work.size(), that cut block rows into contiguous parts.
// `work` holds the work of each block row, >= 0. Cuts are multiples of `multiple` but for the last.
// Among all such cuts, the largest part's work is the smallest. Later parts may be empty if there
// are fewer groups of `multiple` block rows than parts.
std::vector<int64_t> row_cuts(std::span<const int64_t> work, int64_t parts, int64_t multiple);

// The runs of needed block rows within [from, to), in ascending order. `need` has one entry for
// each block row of B.
std::vector<Run> runs_of(std::span<const bool> need, int64_t from, int64_t to);

// At most `most` runs that hold these. Those with the smallest gaps are joined, so that the fewest
// block rows are added.
std::vector<Run> join_runs(std::vector<Run> runs, size_t most);

// The number of block columns in a stage, for a product of `block_columns` block columns that are
// `block_n` wide (32, 64 or 128). A stage has a 16th of the columns, rounded up to a multiple of
// 256, and at least 2048. The last stage may have fewer.
int64_t stage_blocks(int64_t block_columns, int64_t block_n);

// The stages in the order in which to run them, by how much each needs: the least first, because
// nothing hides the copies of the first stage. Equal stages keep their order.
std::vector<int64_t> stage_order(std::span<const int64_t> needed);

}  // namespace spamm::shards
