#include "shards/schedule.h"

#include <ATen/Functions.h>

#include "ops.h"
#include "shards/plan.h"

namespace spamm::shards {

using at::Tensor;

Tensor needed_units(const Tensor& largest_a, const Tensor& norm_b, const Tensor& tau,
                    int64_t stage_blocks) {
  static const auto op = ops::find<Tensor(const Tensor&, const Tensor&, const Tensor&, int64_t)>(
      "spamm_torch::needed_units");
  return op.call(largest_a, norm_b, tau, stage_blocks);
}

StageSchedule::StageSchedule(const Tensor& need) : need_(need.transpose(1, 2).contiguous()) {
  const Tensor counts = need_.sum(2, /*keepdim=*/false, at::kLong);
  for (int64_t part = 0; part < counts.size(0); ++part) {
    order_.push_back(
        stage_order({counts[part].const_data_ptr<int64_t>(), static_cast<size_t>(counts.size(1))}));
  }
}

std::span<const bool> StageSchedule::need(int64_t part, int64_t stage) const {
  return {need_[part][stage].const_data_ptr<bool>(), static_cast<size_t>(need_.size(2))};
}

}  // namespace spamm::shards
