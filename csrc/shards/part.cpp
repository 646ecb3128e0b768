#include "shards/part.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>

#include <algorithm>

#include "arguments.h"
#include "shards/plan.h"

namespace spamm::shards {

using at::Tensor;

WholeProduct::WholeProduct(const Tensor& a, int64_t m, const Tensor& b, const Block& block)
    : m(m),
      k(a.size(1)),
      n(b.size(1)),
      block(block),
      entry_bytes(a.element_size()),
      stage_blocks(shards::stage_blocks(blocks_of(n, block.n), block.n)) {}

int64_t WholeProduct::stages() const { return blocks_of(n, stage_blocks * block.n); }

int64_t WholeProduct::columns(int64_t stage) const {
  return std::min(stage_blocks * block.n, n - first_column(stage));
}

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

Tensor gather_rows(at::TensorList pieces, std::span<const Mark> ready, at::Device device) {
  const Lane current = Lane::current(device);
  const bool in_place =
      std::ranges::all_of(pieces, [&](const Tensor& x) { return x.device() == device; });
  if (in_place) {
    for (const Mark& mark : ready) current.wait_for(mark);
    return at::cat(pieces);
  }
  int64_t rows = 0;
  for (const Tensor& piece : pieces) rows += piece.size(0);
  const Tensor whole = at::empty({rows, pieces[0].size(1)}, pieces[0].options().device(device));
  // Not on the current stream: CUDA's default stream waits for both devices before such a copy.
  const Lane lane = Lane::side(device, kPullLane);
  lane.wait_for(current);
  for (const Mark& mark : ready) lane.wait_for(mark);
  int64_t row = 0;
  for (const Tensor& piece : pieces) {
    copy_rows(lane, whole.narrow(0, row, piece.size(0)), piece);
    row += piece.size(0);
  }
  const Mark copied = lane.mark();
  current.wait_for(copied);
  for (const Tensor& piece : pieces) {
    if (piece.device() != device) Lane::current(piece.device()).wait_for(copied);
  }
  return whole;
}

}  // namespace spamm::shards
