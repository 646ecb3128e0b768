// The plan of a product over several devices: which part owns which rows, and in which stages the
// needed blocks of B travel.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "block.h"

namespace spamm::shards {

// Rows of C are cut at multiples of so many, the height of the kernels' tallest tiles, so that a
// part has no more tiles that stick out than the whole has. A multiple of every block's edge.
inline constexpr int64_t kCutRows = 128;

// The begin of part `part` of equal parts, at a multiple of `edge`; with part = parts, all rows.
inline int64_t equal_cut(int64_t rows, int64_t edge, int64_t part, int64_t parts) {
  return std::min(rows, blocks_of(rows, edge) * part / parts * edge);
}

// Neighbouring needed block rows of B, which one copy moves.
struct Run {
  int64_t first, count;
};

// parts + 1 block-row numbers, from 0 to work.size(), that cut block rows into contiguous parts.
// `work` holds the work of each block row, >= 0. Cuts are multiples of `multiple` but for the last.
// Among all such cuts, the largest part's work is the smallest. Later parts may be empty if there
// are fewer groups of `multiple` block rows than parts.
std::vector<int64_t> row_cuts(std::span<const int64_t> work, int64_t parts, int64_t multiple);

// The runs of needed block rows within [from, to), in ascending order, at most `most`: those with
// the smallest gaps are joined, all of equal gaps. `need` has one entry for each block row of B.
std::vector<Run> runs_of(std::span<const bool> need, int64_t from, int64_t to,
                         size_t most = std::numeric_limits<size_t>::max());

// The number of block columns in a stage, for a product of `block_columns` block columns that are
// `block_n` wide (32, 64 or 128). A stage has a 16th of the columns, rounded up to a multiple of
// 256, and at least 2048. The last stage may have fewer.
int64_t stage_blocks(int64_t block_columns, int64_t block_n);

// ---- Cuts of operands on one device: the others must fetch what they multiply, and get fewer rows

// The cost of a group of rows of A, in one unit of time.
struct GroupCost {
  int64_t multiply;
  int64_t fetch_a;
  int64_t fetch_b;       // all that the group needs of B
  int64_t fetch_more_b;  // what it needs of B that the group before it does not
};

// parts + 1 numbers of groups. Part `home` has the operands; none has if there is no part of this
// number. Another part starts `delay` later, fetches from A first, and then from B while it
// multiplies; n of them share the links of the device that they fetch from, so each waits n times
// as long. A part that would not save time gets no group. Among contiguous cuts, these make the
// slowest part as fast as possible, to a thousandth. (A part is taken to need of B what its first
// group needs and what each other group needs more than the one before; for decay this is exact.)
std::vector<int64_t> cut_for_home(std::span<const GroupCost> groups, int64_t parts, int64_t home,
                                  int64_t delay);

// ---- From norm maps to the numbers of the plan

// norm_b (KB, NB) as (KB, stages, stage_blocks). A shorter last stage is filled up with zeros.
at::Tensor in_stages(const at::Tensor& norm_b, int64_t stage_blocks);

// `largest_a` (parts, KB) holds the largest norm of each part in each column of norm_a, NaN kept.
// Returns bool (parts, KB, stages): whether some block product of the part's rows with block row k
// of the stage is valid. spamm_torch/distributed/plan.py has the same.
at::Tensor needed_units(const at::Tensor& largest_a, const at::Tensor& norm_b,
                        const at::Tensor& tau, int64_t stage_blocks);

// int64 (MB), on the maps' device: the work of each block row of A, in thousandths of a valid block
// product. Integers, so that sums have no order and every device finds the same cuts.
at::Tensor row_work(const at::Tensor& norm_a, const at::Tensor& norm_b, const at::Tensor& tau);

}  // namespace spamm::shards
