// One part of a product over several devices: its rows of C, computed on one device.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <span>
#include <vector>

#include "block.h"
#include "shards/lane.h"
#include "shards/row_copy.h"

namespace spamm::shards {

// Entries; what kernels ask of the start of a row, and more.
inline constexpr int64_t kRowAlignment = 64;

// What all parts of a product share.
struct WholeProduct {
  int64_t m, k, n;
  Block block;
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

// Computes rows of C from rows of A. The whole of B lies on the same device, or B comes stage by
// stage: a stage's needed units are copied from other devices into one of a few buffers while the
// stage before is multiplied. Rows of B on this device are handed to multiply_part where they lie.
//
// Three lanes: `pull` copies, and two lanes multiply in turns, so that one stage starts while the
// last tiles of the other are computed. One of the two is the device's current stream.
class Part {
 public:
  // norm_a: the map of `a`. norm_b: the whole map of B. c: (rows, N). All on one device.
  Part(const WholeProduct& whole, const at::Tensor& a, const at::Tensor& norm_a,
       const at::Tensor& norm_b, const at::Tensor& c);
  // Ends the use of all memory: the device's current stream waits for the other lanes, and those of
  // the devices that B came from wait for the copies.
  ~Part();
  Part(const Part&) = delete;

  // `b`: the whole of B. tau: 0-d, on the device or the CPU.
  void multiply(const at::Tensor& b, const at::Tensor& tau);

  // `b` holds all rows of B. If the first shard lies on this device, it is multiply_part's
  // own_rows: read in place where the kernel can, else copied there. Allocates the buffers of
  // stages. Throws OutOfMemoryError before any copy has started.
  void prepare_stages(std::vector<RowShard> b);
  // Copies the needed units of the stage and multiplies. need: for each block row of B.
  void run_stage(int64_t stage, std::span<const bool> need, const at::Tensor& tau);

 private:
  static constexpr int kBuffers = 3;

  at::Device device() const { return c_.device(); }
  bool owns(const RowShard& shard) const;
  void copy_units(int64_t stage, std::span<const bool> need, const at::Tensor& buffer) const;
  at::Tensor norms_of_stage(int64_t stage) const;

  const WholeProduct& whole_;
  at::Tensor a_, norm_a_, norm_b_, c_;
  std::array<Lane, 2> multiply_;
  Lane pull_;
  std::vector<RowShard> b_;
  at::Tensor stage_norms_;  // norm_b's stages, each contiguous; (stages, KB, stage_blocks)
  std::array<at::Tensor, kBuffers> buffers_;
  std::array<Mark, kBuffers> multiplied_;  // when each buffer may be overwritten
  int runs_ = 0;                           // stages so far
};

}  // namespace spamm::shards
