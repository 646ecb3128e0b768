// From norm maps to the numbers of the plan.
#pragma once

#include <ATen/core/Tensor.h>

namespace spamm::shards {

// norm_b (KB, NB) as (KB, stages, stage_blocks). A last stage that has fewer columns is filled up
// with zeros.
at::Tensor in_stages(const at::Tensor& norm_b, int64_t stage_blocks);

// `largest_a` (parts, KB) holds the largest norm of each part in each column of norm_a, NaN kept.
// Returns bool (parts, KB, stages): whether some block product of the part's rows with block row k
// of the stage is valid. _plan.py has the same.
at::Tensor needed_units(const at::Tensor& largest_a, const at::Tensor& norm_b,
                        const at::Tensor& tau, int64_t stage_blocks);

// int64 (MB), on the maps' device: the work of each block row of A, in thousandths of a valid block
// product. Integers, so that sums have no order and every device finds the same cuts.
at::Tensor row_work(const at::Tensor& norm_a, const at::Tensor& norm_b, const at::Tensor& tau);

}  // namespace spamm::shards
