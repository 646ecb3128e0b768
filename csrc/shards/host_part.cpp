#include "shards/host_part.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <vector>

#include "shards/host_reader.h"
#include "shards/row_copy.h"
#include "spamm/spamm.h"

namespace spamm::shards {
namespace {

using at::Tensor;

int64_t aligned(int64_t columns) { return blocks_of(columns, kRowAlignment) * kRowAlignment; }

}  // namespace

HostPart::HostPart(const HostProduct& product, at::Device device, int64_t number, int64_t most_rows)
    : product_(product),
      number_(number),
      most_rows_(most_rows),
      pull_(Lane::side(device, kPullLane)),
      multiply_{Lane::current(device), Lane::side(device, kMultiplyLane)},
      send_(Lane::side(device, kSendLane)),
      reader_(device, product.ring_bytes) {
  const auto on_device = multiply_[0].use();
  const WholeProduct& whole = product.whole;
  const auto options = product.a.rows.options().device(device);
  const auto empty = [&](int64_t rows, int64_t columns) {
    return at::empty({rows, aligned(columns)}, options).narrow(1, 0, columns);
  };
  naming_memory(device, buffer_bytes(), [&] {
    a_ = empty(most_rows, whole.k);
    for (Tensor& stage : stages_) stage = empty(whole.k, whole.columns(0));
    for (Tensor& c : c_) c = empty(most_rows, whole.columns(0));
    if (product.norm_a) whole_norm_a_ = product.norm_a->to(device);
    if (product.norm_b) whole_norm_b_ = product.norm_b->to(device);
  });
  for (const Lane* lane : lanes()) lane->wait_for(multiply_[0]);
}

int64_t HostPart::buffer_bytes() const {
  const WholeProduct& whole = product_.whole;
  const int64_t columns = aligned(whole.columns(0));
  return (most_rows_ * aligned(whole.k) + kBuffers * whole.k * columns + 2 * most_rows_ * columns) *
         product_.a.rows.element_size();
}

int64_t HostPart::first_row(int64_t number) const {
  const int64_t edge = std::max(product_.whole.block.k, kRowAlignment);
  const int64_t edges = blocks_of(product_.whole.k, edge);
  return std::min(product_.whole.k, edges * number / product_.parts * edge);
}

Tensor HostPart::stage_buffer(const Step& step) const {
  return stages_[step.number % kBuffers].narrow(1, 0, product_.whole.columns(step.stage));
}

Tensor HostPart::own_rows(const Tensor& stage) const {
  return stage.narrow(0, first_row(number_), rows_of_b());
}

void HostPart::read_panel(int64_t row, int64_t rows) {
  row_ = row, rows_ = rows;
  // Both lanes' last multiplies are among the marks.
  std::vector<const Mark*> after;
  for (const Mark& mark : multiplied_) after.push_back(&mark);
  reading_panel_ = reader_.read(a_.narrow(0, 0, rows), product_.a, row, 0, std::move(after));
}

void HostPart::finish_reading_panel() {
  multiply_[0].wait_for(reading_panel_.get());
  if (rows_ == 0) return;
  const auto on_lane = multiply_[0].use();
  const Block& block = product_.whole.block;
  if (whole_norm_a_.defined()) {
    norm_a_ = whole_norm_a_.narrow(0, row_ / block.m, blocks_of(rows_, block.m));
  } else {
    naming_memory(device(), buffer_bytes(), [&] {
      norm_a_ = norm_map(a_.narrow(0, 0, rows_), {block.m, block.k});
    });
  }
  multiply_[1].wait_for(multiply_[0]);
}

void HostPart::read_stage(const Step& step, const std::deque<HostPart>& parts) {
  const auto slot = step.number % kBuffers;
  std::vector<const Mark*> after = {&multiplied_[slot]};
  for (const HostPart& part : parts) {
    if (&part != this) after.push_back(&part.pulled_[slot]);
  }
  reading_[slot] = reader_.read(own_rows(stage_buffer(step)), product_.b, first_row(number_),
                                product_.whole.first_column(step.stage), std::move(after));
}

void HostPart::finish_reading(const Step& step) {
  const auto slot = step.number % kBuffers;
  read_[slot] = reading_[slot].get();
}

void HostPart::pull_stage(const Step& step, const std::deque<HostPart>& parts) {
  if (rows_ == 0) return;
  const auto slot = step.number % kBuffers;
  const Tensor to = stage_buffer(step);
  pull_.wait_for(multiplied_[slot]);
  // From the next part first, so that not all parts read from one device.
  for (size_t i = 1; i < parts.size(); ++i) {
    const HostPart& part = parts[(number_ + i) % parts.size()];
    pull_.wait_for(part.read_[slot]);
    copy_rows(pull_, part.own_rows(to), part.own_rows(part.stage_buffer(step)));
  }
  pulled_[slot] = pull_.mark();
}

Tensor HostPart::norms_of_stage(const Step& step, const Tensor& stage) const {
  const auto& [m, k, n] = product_.whole.block;
  if (!whole_norm_b_.defined()) return norm_map(stage, {k, n});
  return whole_norm_b_.narrow(1, step.stage * product_.whole.stage_blocks,
                              blocks_of(stage.size(1), n));
}

void HostPart::multiply_stage(const Step& step) {
  if (rows_ == 0) return;
  const auto slot = step.number % kBuffers;
  const auto turn = step.number % multiply_.size();
  const Lane& lane = multiply_[turn];
  const Tensor stage = stage_buffer(step);
  const Tensor c = c_[turn].narrow(0, 0, rows_).narrow(1, 0, stage.size(1));
  for (const Mark* mark : {&read_[slot], &pulled_[slot], &sent_[turn]}) lane.wait_for(*mark);
  {
    const auto on_lane = lane.use();
    naming_memory(device(), buffer_bytes(), [&] {
      multiply_part(a_.narrow(0, 0, rows_), stage, norm_a_, norms_of_stage(step, stage),
                    product_.tau, product_.whole, c);
    });
  }
  multiplied_[slot] = lane.mark();
  send_.wait_for(multiplied_[slot]);
  const int64_t column = product_.whole.first_column(step.stage);
  copy_rows(send_, product_.c.narrow(0, row_, rows_).narrow(1, column, stage.size(1)), c);
  sent_[turn] = send_.mark();
}

std::array<const Lane*, 5> HostPart::lanes() const {
  return {&reader_.lane(), &pull_, &multiply_[0], &multiply_[1], &send_};
}

void HostPart::wait_on_host() const {
  for (const Lane* lane : lanes()) lane->wait_on_host();
}

}  // namespace spamm::shards
