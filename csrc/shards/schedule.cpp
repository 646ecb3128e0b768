#include "shards/schedule.h"

#include <algorithm>

#include "shards/plan.h"

namespace spamm::shards {

StageSchedule::StageSchedule(int64_t parts, int64_t stages, int64_t block_rows)
    : parts_(parts),
      stages_(stages),
      block_rows_(block_rows),
      need_(std::make_unique<bool[]>(parts * stages * block_rows)) {}

std::span<bool> StageSchedule::all() {
  return {need_.get(), static_cast<size_t>(parts_ * stages_ * block_rows_)};
}

std::span<bool> StageSchedule::need(int64_t part, int64_t stage) {
  return {&need_[(part * stages_ + stage) * block_rows_], static_cast<size_t>(block_rows_)};
}

std::span<const bool> StageSchedule::need(int64_t part, int64_t stage) const {
  return const_cast<StageSchedule*>(this)->need(part, stage);
}

std::vector<int64_t> StageSchedule::order(int64_t part) const {
  std::vector<int64_t> counts;
  for (int64_t stage = 0; stage < stages_; ++stage) {
    counts.push_back(std::ranges::count(need(part, stage), true));
  }
  return stage_order(counts);
}

}  // namespace spamm::shards
