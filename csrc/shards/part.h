// The engine of products over several devices. A part computes rows of C on one device, in stages
// of columns. Its rows of A, B and C are in its own memory, in other devices' or in the host's.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <optional>
#include <span>
#include <vector>

#include "block.h"
#include "shards/lane.h"
#include "shards/row_copy.h"

namespace spamm::shards {

// To what kernels ask of the start of a row, and more.
inline int64_t aligned(int64_t columns) { return blocks_of(columns, 64) * 64; }

struct WholeProduct {
  // The product of A (M, K) and B (K, N).
  WholeProduct(const at::Tensor& a, int64_t m, const at::Tensor& b, const Block& block);

  int64_t m, k, n;
  Block block;
  int64_t entry_bytes;
  int64_t stage_blocks;  // block columns of a stage

  int64_t stages() const { return blocks_of(n, stage_blocks * block.n); }
  int64_t first_column(int64_t stage) const { return stage * stage_blocks * block.n; }
  int64_t columns(int64_t stage) const {
    return std::min(stage_blocks * block.n, n - first_column(stage));
  }
};

// The op multiply_part on tensors of one device. own_rows: rows of b from first_own_row on, which b
// itself need not hold.
void multiply_part(const at::Tensor& a, const at::Tensor& b, const at::Tensor& norm_a,
                   const at::Tensor& norm_b, const at::Tensor& tau, const WholeProduct& whole,
                   const at::Tensor& out, const std::optional<at::Tensor>& own_rows = std::nullopt,
                   int64_t first_own_row = 0);

// Norm maps, one below the other, on `device`. They are contiguous and have one number of columns.
// ready: when each has been computed; the device's pull lane waits for that. The current streams of
// their devices wait for the copies, so that their memory may be used again.
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

// Destructors end the use of memory by `work`. Where it throws, the device has failed, and the
// error that says so is on its way.
template <class Work>
void quietly(const Work& work) noexcept {
  try {
    work();
  } catch (const c10::Error&) {  // NOLINT(bugprone-empty-catch)
  }
}

// The rows of a matrix: first[i] is the first one of rows[i]. The rows are contiguous.
struct Shards {
  std::vector<at::Tensor> rows;
  std::vector<int64_t> first;
};

// Rows of A and C on a part's device.
struct PartRows {
  at::Tensor a, norm_a;
  std::vector<at::Tensor> c;  // one of all columns, or two that stages of columns take in turns
  at::Tensor to = {};         // if defined: rows of C elsewhere, to which each stage is sent
};

// Each stage's rows of B come to one of a few buffers while the stages before are multiplied. A
// buffer is written again after the multiply that read it. Two lanes multiply in turns, so that one
// stage starts while the last tiles of the other are computed: the device's current stream and a
// side lane.
class Part {
 public:
  // It has side lanes up to the last. `b` holds all rows of B, or nothing if another than run()
  // brings them. Those of shard `own` lie on this device: they are multiply_part's own_rows, read
  // in place where the kernel can, else copied.
  Part(const WholeProduct& whole, at::Device device, int last_lane, Shards b = {},
       std::optional<size_t> own = std::nullopt);
  // The current stream waits for every lane. Those of the devices that B came from wait for the
  // copies from and to them.
  ~Part();
  Part(const Part&) = delete;

  at::Device device() const { return own().device(); }
  const Lane& own() const { return lanes_[0]; }
  const Lane& side(int number) const { return lanes_[1 + number]; }
  // Lets what is enqueued on lanes from now on start after what the current stream has.
  void start() const {
    for (const Lane& lane : lanes_) lane.wait_for(own());
  }
  // The host goes on once all lanes are done.
  void finish() const {
    for (const Lane& lane : lanes_) lane.wait_on_host();
  }

  // Takes memory for stages, or throws OutOfMemoryError.
  void take_buffers(const at::TensorOptions& options);
  int64_t buffer_bytes() const;
  // The whole map of B, on this device. Without one, the norms of each stage are computed.
  void take_norms(const at::Tensor& norm_b);

  // Computes all columns of the rows. need: the block rows of B that are needed in each stage; bool
  // (stages, KB), on the CPU. tau: on this device or the CPU. Stages that need the least run first,
  // because nothing hides the copies of the first.
  void run(const PartRows& rows, const at::Tensor& need, const at::Tensor& tau);

 protected:
  // The buffer of the stage that comes in this turn.
  size_t slot(int64_t turn) const { return turn % buffers_.size(); }
  at::Tensor buffer(int64_t turn, int64_t stage) const {
    return buffers_[slot(turn)].narrow(1, 0, whole_.columns(stage));
  }
  // Multiplies the stage once the pull lane is done, and sends it.
  void multiply(int64_t turn, int64_t stage);

  static constexpr int64_t kBuffers = 3;
  const WholeProduct& whole_;
  PartRows rows_;
  at::Tensor tau_;                         // kept, as lanes read it up to the end
  at::Tensor stage_norms_;                 // B's of each stage; (stages, KB, stage_blocks)
  std::array<Mark, kBuffers> multiplied_;  // when each buffer may be overwritten

 private:
  void pull(int64_t turn, int64_t stage, std::span<const bool> need) const;

  std::vector<Lane> lanes_;  // the device's current stream, then side lanes
  Shards b_;
  std::optional<size_t> own_;
  std::vector<at::Tensor> buffers_;
  std::array<Mark, 2> sent_;  // when each of two c may be overwritten
};

}  // namespace spamm::shards
