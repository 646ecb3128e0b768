// Which part runs which stage when.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <vector>

namespace spamm::shards {

// The op needed_units.
at::Tensor needed_units(const at::Tensor& largest_a, const at::Tensor& norm_b,
                        const at::Tensor& tau, int64_t stage_blocks);

// Runs all stages of parts, one stage of each part after the other, so that all devices are busy
// from the start. Each part begins with the stages that need the fewest block rows from elsewhere.
class StageSchedule {
 public:
  // need: (parts, KB, stages), bool on the CPU.
  explicit StageSchedule(const at::Tensor& need);

  int64_t stages() const { return static_cast<int64_t>(order_.empty() ? 0 : order_[0].size()); }
  // The stage that part `part` runs as number `turn`, and which block rows of B it needs.
  int64_t stage(int64_t part, int64_t turn) const { return order_[part][turn]; }
  std::span<const bool> need(int64_t part, int64_t stage) const;

 private:
  at::Tensor need_;  // (parts, stages, KB), contiguous
  std::vector<std::vector<int64_t>> order_;
};

}  // namespace spamm::shards
