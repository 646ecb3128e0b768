#include "shards/part.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <numeric>

#include "arguments.h"
#include "shards/plan.h"
#include "spamm/spamm.h"
#include "threshold.h"

namespace spamm::shards {

using at::Tensor;

WholeProduct::WholeProduct(const Tensor& a, int64_t m, const Tensor& b, const Block& block)
    : m(m),
      k(a.size(1)),
      n(b.size(1)),
      block(block),
      entry_bytes(a.element_size()),
      stage_blocks(shards::stage_blocks(blocks_of(n, block.n), block.n)) {}

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

Tensor gather_rows(at::TensorList pieces, std::span<const Mark> ready, at::Device device) {
  const Lane current = Lane::current(device);
  int64_t rows = 0, row = 0;
  for (const Tensor& piece : pieces) rows += piece.size(0);
  const Tensor whole = at::empty({rows, pieces[0].size(1)}, pieces[0].options().device(device));
  // Not on the current stream: CUDA's default stream waits for both devices before such a copy.
  const Lane lane = Lane::side(device, kPullLane);
  lane.wait_for(current);
  for (const Mark& mark : ready) lane.wait_for(mark);
  for (const Tensor& piece : pieces) {
    copy_rows(lane, whole.narrow(0, row, piece.size(0)), piece);
    row += piece.size(0);
  }
  const Mark copied = lane.mark();
  for (const Tensor& piece : pieces) Lane::current(piece.device()).wait_for(copied);
  current.wait_for(copied);
  return whole;
}

Part::Part(const WholeProduct& whole, at::Device device, int last_lane, Shards b,
           std::optional<size_t> own)
    : whole_(whole), lanes_{Lane::current(device)}, b_(std::move(b)), own_(own) {
  for (int number = 0; number <= last_lane; ++number) lanes_.push_back(Lane::side(device, number));
}

Part::~Part() {
  quietly([&] {
    for (const Lane& lane : lanes_) own().wait_for(lane);
    for (const Tensor& rows : b_.rows) {
      const Lane current = Lane::current(rows.device());
      for (size_t i = 1 + kPullLane; i < lanes_.size(); ++i) current.wait_for(lanes_[i]);
    }
  });
}

int64_t Part::buffer_bytes() const {
  return std::min(kBuffers, whole_.stages()) * whole_.k * aligned(whole_.columns(0)) *
         whole_.entry_bytes;
}

void Part::take_buffers(const at::TensorOptions& options) {
  naming_memory(
      [&] {
        for (int64_t i = 0; i < std::min(kBuffers, whole_.stages()); ++i) {
          buffers_.push_back(
              at::empty({whole_.k, aligned(whole_.columns(0))}, options.device(device())));
        }
      },
      "a product over several devices needs ", buffer_bytes(), " bytes on ", device(),
      " for stages of B");
}

void Part::take_norms(const Tensor& norm_b) {
  stage_norms_ = in_stages(norm_b, whole_.stage_blocks).permute({1, 0, 2}).contiguous();
}

void Part::run(const PartRows& rows, const Tensor& need, const Tensor& tau) {
  rows_ = rows, tau_ = tau;
  side(kMultiplyLane).wait_for(own());  // on which tau has been found since
  const auto need_of = [&](int64_t stage) {
    const auto blocks = static_cast<size_t>(need.size(1));
    return std::span(need.const_data_ptr<bool>() + stage * blocks, blocks);
  };
  std::vector<int64_t> counts, order(need.size(0));
  std::iota(order.begin(), order.end(), 0);
  for (const int64_t stage : order) counts.push_back(std::ranges::count(need_of(stage), true));
  std::ranges::stable_sort(order, {}, [&](int64_t stage) { return counts[stage]; });
  int64_t turn = 0;
  for (const int64_t stage : order) {
    pull(turn, stage, need_of(stage));
    multiply(turn++, stage);
  }
}

// Copies the needed units of the stage to its buffer: from the shard after the own one first, so
// that not all parts read from one device. need: for each block row of B.
void Part::pull(int64_t turn, int64_t stage, std::span<const bool> need) const {
  const Tensor to = buffer(turn, stage);
  const int64_t edge = whole_.block.k;
  side(kPullLane).wait_for(multiplied_[slot(turn)]);
  for (size_t i = own_ ? 1 : 0; i < b_.rows.size(); ++i) {
    const size_t p = (own_.value_or(0) + i) % b_.rows.size();
    const int64_t first = b_.first[p], last = first + b_.rows[p].size(0);
    if (first == last) continue;
    std::vector<RowBlock> copies;
    for (const Run& run : runs_of(need, first / edge, blocks_of(last, edge), kMostCopies)) {
      const int64_t row = run.first * edge, rows = std::min(last - row, run.count * edge);
      copies.push_back(block_between(to, row, 0, b_.rows[p], row - first,
                                     whole_.first_column(stage), rows, to.size(1)));
    }
    copy_blocks(side(kPullLane), device(), b_.rows[p].device(), copies);
  }
}

void Part::multiply(int64_t turn, int64_t stage) {
  // Thread blocks that skip nothing keep pace (kernels/multiply/sm90/list.cuh), which two
  // multiplies at a time would not let them.
  const Lane& lane = skips_nothing(tau_) || turn % 2 == 0 ? own() : side(kMultiplyLane);
  const Tensor b = buffer(turn, stage);
  const auto columns_of = [&](const Tensor& x) {
    return x.narrow(1, whole_.first_column(stage) % x.size(1), b.size(1));
  };
  const size_t which = stage % rows_.c.size();
  const Tensor c = columns_of(rows_.c[which]);
  lane.wait_for(side(kPullLane));
  if (rows_.c.size() > 1) lane.wait_for(sent_[which]);
  {
    const auto on_lane = lane.use();
    const auto& [m, k, n] = whole_.block;
    const Tensor norms = stage_norms_.defined()
                             ? stage_norms_.select(0, stage).narrow(1, 0, blocks_of(b.size(1), n))
                             : norm_map(b, {k, n});
    multiply_part(rows_.a, b, rows_.norm_a, norms, tau_, whole_, c,
                  own_ ? std::optional(columns_of(b_.rows[*own_])) : std::nullopt,
                  own_ ? b_.first[*own_] : 0);
  }
  multiplied_[slot(turn)] = lane.mark();
  if (!rows_.to.defined()) return;
  side(kSendLane).wait_for(multiplied_[slot(turn)]);
  copy_rows(side(kSendLane), columns_of(rows_.to), c);
  sent_[which] = side(kSendLane).mark();
}

}  // namespace spamm::shards
