#include "shards/part.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

#include "arguments.h"
#include "checks.h"
#include "shards/plan.h"
#include "shards/plan_maps.h"

namespace spamm::shards {

using at::Tensor;

void multiply_part(const Tensor& a, const Tensor& b, const Tensor& norm_a, const Tensor& norm_b,
                   const Tensor& tau, const WholeProduct& whole, const Tensor& out,
                   const std::optional<Tensor>& own_rows, int64_t first_own_row) {
  const Block& block = whole.block;
  ops::multiply_part({{{}, a, b, norm_a, norm_b, tau, {block.m, block.k, block.n}},
                      out,
                      {whole.m, whole.n},
                      own_rows,
                      first_own_row});
}

int64_t WholeProduct::stages() const { return blocks_of(n, stage_blocks * block.n); }

int64_t WholeProduct::columns(int64_t stage) const {
  return std::min(stage_blocks * block.n, n - first_column(stage));
}

std::vector<RowBlock> unit_copies(const WholeProduct& whole, int64_t stage,
                                  std::span<const bool> need, const RowShard& shard,
                                  const Tensor& to, int64_t to_column) {
  std::vector<RowBlock> copies;
  if (shard.rows.size(0) == 0) return copies;
  const int64_t edge = whole.block.k, last = shard.first + shard.rows.size(0);
  const auto runs = runs_of(need, shard.first / edge, blocks_of(last, edge));
  for (const Run& run : join_runs(runs, kMostCopies)) {
    const int64_t row = run.first * edge, rows = std::min(last - row, run.count * edge);
    copies.push_back(block_between(to, row, to_column, shard.rows, row - shard.first,
                                   whole.first_column(stage), rows, whole.columns(stage)));
  }
  return copies;
}

Part::Part(const WholeProduct& whole, const Tensor& a, const Tensor& norm_a, const Tensor& norm_b,
           const Tensor& c)
    : whole_(whole),
      a_(a),
      norm_a_(norm_a),
      norm_b_(norm_b),
      c_(c),
      multiply_{Lane::current(c.device()), Lane::side(c.device(), kMultiplyLane)},
      pull_(Lane::side(c.device(), kPullLane)) {}

Part::~Part() {
  try {
    multiply_[0].wait_for(multiply_[1]);
    multiply_[0].wait_for(pull_);
    for (const RowShard& shard : b_) Lane::current(shard.rows.device()).wait_for(pull_);
  } catch (const c10::Error&) {
    // The device has failed, and the error that says so is on its way.
  }
}

void Part::multiply(const Tensor& b, const Tensor& tau) {
  const auto on_lane = multiply_[0].use();
  multiply_part(a_, b, norm_a_, norm_b_, tau, whole_, c_);
}

void Part::prepare_stages(std::vector<RowShard> b) {
  const auto on_lane = multiply_[0].use();
  stage_norms_ = in_stages(norm_b_, whole_.stage_blocks).permute({1, 0, 2}).contiguous();
  const int64_t columns = blocks_of(whole_.columns(0), kRowAlignment) * kRowAlignment;
  const int count = static_cast<int>(std::min<int64_t>(kBuffers, whole_.stages()));
  try {
    for (int i = 0; i < count; ++i) buffers_[i] = at::empty({whole_.k, columns}, a_.options());
  } catch (const c10::OutOfMemoryError&) {
    TORCH_CHECK_WITH(OutOfMemoryError, false, "a product over several devices needs ",
                     count * whole_.k * columns * a_.element_size(), " bytes on ", device(),
                     " for stages of B");
  }
  multiply_[1].wait_for(multiply_[0]);
  b_ = std::move(b);
  pull_.wait_for(multiply_[0]);
  for (const RowShard& shard : b_) pull_.wait_for(Lane::current(shard.rows.device()));
}

bool Part::owns(const RowShard& shard) const {
  return &shard == &b_.front() && shard.rows.device() == device();
}

void Part::run_stage(int64_t stage, std::span<const bool> need, const Tensor& tau) {
  const int slot = runs_ % kBuffers;
  const Lane& lane = multiply_[runs_++ % multiply_.size()];
  const Tensor buffer = buffers_[slot].narrow(1, 0, whole_.columns(stage));
  pull_.wait_for(multiplied_[slot]);
  copy_units(stage, need, buffer);
  lane.wait_for(pull_);
  const auto on_lane = lane.use();
  const auto columns_of = [&](const Tensor& x) {
    return x.narrow(1, whole_.first_column(stage), whole_.columns(stage));
  };
  const RowShard& own = b_.front();
  multiply_part(a_, buffer, norm_a_, norms_of_stage(stage), tau, whole_, columns_of(c_),
                owns(own) ? std::optional(columns_of(own.rows)) : std::nullopt, own.first);
  multiplied_[slot] = lane.mark();
}

void Part::copy_units(int64_t stage, std::span<const bool> need, const Tensor& buffer) const {
  for (const RowShard& shard : b_) {
    if (owns(shard)) continue;
    copy_blocks(pull_, device(), shard.rows.device(),
                unit_copies(whole_, stage, need, shard, buffer, 0));
  }
}

Tensor Part::norms_of_stage(int64_t stage) const {
  const int64_t blocks = blocks_of(whole_.columns(stage), whole_.block.n);
  return stage_norms_.select(0, stage).narrow(1, 0, blocks);
}

}  // namespace spamm::shards
