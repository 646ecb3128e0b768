// What the parts of a product over several devices share, wherever its operands lie.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <span>
#include <vector>

#include "block.h"
#include "shards/lane.h"
#include "shards/row_copy.h"
#include "threshold.h"

namespace spamm::shards {

// Entries; what kernels ask of the start of a row, and more.
inline constexpr int64_t kRowAlignment = 64;

inline int64_t aligned(int64_t columns) {
  return blocks_of(columns, kRowAlignment) * kRowAlignment;
}

struct WholeProduct {
  // Of A (M, K) and B (K, N).
  WholeProduct(const at::Tensor& a, int64_t m, const at::Tensor& b, const Block& block);

  int64_t m, k, n;
  Block block;
  int64_t entry_bytes;
  int64_t stage_blocks;  // block columns of a stage

  int64_t stages() const;
  int64_t first_column(int64_t stage) const { return stage * stage_blocks * block.n; }
  int64_t columns(int64_t stage) const;
};

// The op multiply_part on tensors of one device. own_rows: rows of b from first_own_row on, which b
// itself need not hold.
void multiply_part(const at::Tensor& a, const at::Tensor& b, const at::Tensor& norm_a,
                   const at::Tensor& norm_b, const at::Tensor& tau, const WholeProduct& whole,
                   const at::Tensor& out, const std::optional<at::Tensor>& own_rows = std::nullopt,
                   int64_t first_own_row = 0);

// The lane of a multiply. Where nothing is skipped thread blocks keep pace
// (kernels/multiply/sm90/list.cuh), which two multiplies at a time would not let them.
inline int64_t multiply_lane(const at::Tensor& tau, int64_t turn) {
  return skips_nothing(tau) ? 0 : turn;
}

// Rows of a matrix, from row `first` on. Its rows are contiguous.
struct RowShard {
  at::Tensor rows;
  int64_t first;
};

// The copies that bring a stage's needed units from `shard`, rows of B, to their rows of `to`, from
// its column `to_column` on. need: for each block row of B.
std::vector<RowBlock> unit_copies(const WholeProduct& whole, int64_t stage,
                                  std::span<const bool> need, const RowShard& shard,
                                  const at::Tensor& to, int64_t to_column);

// Norm maps of other devices, one below the other, on `device`. They are contiguous and have one
// number of columns. ready: when each piece has been computed. The current streams of their devices
// wait for the copies, so that the pieces' memory may be used again.
at::Tensor gather_rows(at::TensorList pieces, std::span<const Mark> ready, at::Device device);

// Runs `work`, which takes memory. The text of an OutOfMemoryError is then `text`.
template <class Work, class... Text>
void naming_memory(const Work& work, const Text&... text) {
  bool failed = false;
  try {
    work();
  } catch (const c10::OutOfMemoryError&) {
    failed = true;
  }
  TORCH_CHECK_WITH(OutOfMemoryError, !failed, text...);
}

}  // namespace spamm::shards
