// From norm maps to the numbers of the plan.
#pragma once

#include <ATen/core/Tensor.h>

namespace spamm::shards {

// int64 (MB), on the maps' device: the work of each block row of A, in thousandths of a valid block
// product. Integers, so that sums have no order and every device finds the same cuts.
at::Tensor row_work(const at::Tensor& norm_a, const at::Tensor& norm_b, const at::Tensor& tau);

}  // namespace spamm::shards
