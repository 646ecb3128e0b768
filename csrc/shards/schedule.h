// Which part runs which stage when, and what it needs of B.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace spamm::shards {

class StageSchedule {
 public:
  StageSchedule(int64_t parts, int64_t stages, int64_t block_rows);

  // (parts, stages, block rows)
  std::span<bool> all();
  // Whether `part` needs each block row of B in a stage. Must be filled before order().
  std::span<bool> need(int64_t part, int64_t stage);
  std::span<const bool> need(int64_t part, int64_t stage) const;

  int64_t stages() const { return stages_; }
  // The stages of a part, those that need the fewest block rows first.
  std::vector<int64_t> order(int64_t part) const;

 private:
  int64_t parts_, stages_, block_rows_;
  std::unique_ptr<bool[]> need_;
};

}  // namespace spamm::shards
