// The engine of products over several devices. A part computes rows of C on one device, in stages
// of columns. Its rows of A, B and C are in its own memory, in other devices' or in the host's.
#pragma once

#include <ATen/ops/empty.h>

#include <algorithm>
#include <array>
#include <numeric>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "arguments.h"
#include "shards/lane.h"
#include "shards/plan.h"
#include "spamm/spamm.h"
#include "threshold.h"

namespace spamm::shards {

using at::Tensor;

// To what kernels ask of the start of a row, and more.
inline int64_t aligned(int64_t columns) { return blocks_of(columns, 64) * 64; }

struct WholeProduct {
  // The product of A (M, K) and B (K, N).
  WholeProduct(const Tensor& a, int64_t m, const Tensor& b, const Block& block)
      : m(m),
        k(a.size(1)),
        n(b.size(1)),
        block(block),
        entry_bytes(a.element_size()),
        stage_blocks(shards::stage_blocks(blocks_of(n, block.n), block.n)) {}

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

// multiply_part on tensors of a device. own_rows: b's rows from first_own_row on, which b may lack.
inline void multiply_part(const Tensor& a, const Tensor& b, const Tensor& norm_a,
                          const Tensor& norm_b, const Tensor& tau, const WholeProduct& whole,
                          const Tensor& out, const std::optional<Tensor>& own_rows = std::nullopt,
                          int64_t first_own_row = 0) {
  const Block& block = whole.block;
  ops::multiply_part({{{}, a, b, norm_a, norm_b, tau, {block.m, block.k, block.n}},
                      out,
                      {whole.m, whole.n},
                      own_rows,
                      first_own_row});
}

// Norm maps, one below the other, on `device`. They are contiguous and have one number of columns.
// ready: when each has been computed; the device's pull lane waits for that. The current streams of
// their devices wait for the copies, so that their memory may be used again.
inline Tensor gather_rows(at::TensorList pieces, std::span<const Mark> ready, at::Device device) {
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

// Runs `work`, which takes memory. The text of an OutOfMemoryError is then `text`.
template <class Work, class... Text>
void naming_memory(const Work& work, const Text&... text) {
  try {
    work();
  } catch (const c10::OutOfMemoryError&) {
    TORCH_CHECK_WITH(OutOfMemoryError, false, text...);
  }
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
  std::vector<Tensor> rows;
  std::vector<int64_t> first;
};

// Rows of A and C on a part's device.
struct PartRows {
  Tensor a, norm_a;
  std::vector<Tensor> c;  // one of all columns, or two that stages of columns take in turns
  Tensor to = {};         // if defined: rows of C elsewhere, to which each stage is sent
};

// Each stage's rows of B come to one of a few buffers while the stages before are multiplied. A
// buffer is written again after the multiply that read it. Two lanes multiply in turns, so that one
// stage starts while the last tiles of the other are computed: the current stream and a side lane.
class Part {
 public:
  // It has side lanes up to the last. `b` holds all rows of B, or nothing if another than run()
  // brings them. Those of shard `own` lie on this device: they are multiply_part's own_rows, read
  // in place where the kernel can, else copied.
  Part(const WholeProduct& whole, at::Device device, int last_lane, Shards b = {},
       std::optional<size_t> own = std::nullopt)
      : whole_(whole), lanes_{Lane::current(device)}, b_(std::move(b)), own_(own) {
    for (int number = 0; number <= last_lane; ++number)
      lanes_.push_back(Lane::side(device, number));
  }
  // The current stream waits for every lane. Those of the devices that B came from wait for the
  // copies from and to them.
  ~Part() {
    quietly([&] {
      for (const Lane& lane : lanes_) own().wait_for(lane);
      for (const Tensor& rows : b_.rows) {
        const Lane current = Lane::current(rows.device());
        for (size_t i = 1 + kPullLane; i < lanes_.size(); ++i) current.wait_for(lanes_[i]);
      }
    });
  }
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
  void take_buffers(const at::TensorOptions& options) {
    const auto take = [&] {
      buffers_ = at::empty({stages_at_once(), whole_.k, aligned(whole_.columns(0))},
                           options.device(device()))
                     .unbind();
    };
    naming_memory(take, "a product over several devices needs ", buffer_bytes(), " bytes on ",
                  device(), " for stages of B");
  }
  int64_t buffer_bytes() const {
    return stages_at_once() * whole_.k * aligned(whole_.columns(0)) * whole_.entry_bytes;
  }
  // The whole map of B, on this device. Without one, the norms of each stage are computed.
  void take_norms(const Tensor& norm_b) {
    stage_norms_ = in_stages(norm_b, whole_.stage_blocks).permute({1, 0, 2}).contiguous();
  }

  // Computes all columns of the rows. need: the block rows of B that are needed in each stage; bool
  // (stages, KB), on the CPU. tau: on this device or the CPU. Stages that need the least run first,
  // because nothing hides the copies of the first.
  void run(const PartRows& rows, const Tensor& need, const Tensor& tau) {
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

 protected:
  // The buffer of the stage that comes in this turn.
  size_t slot(int64_t turn) const { return turn % buffers_.size(); }
  Tensor buffer(int64_t turn, int64_t stage) const {
    return buffers_[slot(turn)].narrow(1, 0, whole_.columns(stage));
  }
  // Multiplies the stage once the pull lane is done, and sends it.
  void multiply(int64_t turn, int64_t stage) {
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

  static constexpr int64_t kBuffers = 3;  // at most
  const WholeProduct& whole_;
  PartRows rows_;
  Tensor tau_;                             // kept, as lanes read it up to the end
  Tensor stage_norms_;                     // B's of each stage; (stages, KB, stage_blocks)
  std::array<Mark, kBuffers> multiplied_;  // when each buffer may be overwritten

 private:
  int64_t stages_at_once() const { return std::min(kBuffers, whole_.stages()); }
  // Copies the needed units of the stage to its buffer: from the shard after the own one first, so
  // that not all parts read from one device. need: for each block row of B.
  void pull(int64_t turn, int64_t stage, std::span<const bool> need) const {
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

  std::vector<Lane> lanes_;  // the device's current stream, then side lanes
  Shards b_;
  std::optional<size_t> own_;
  std::vector<Tensor> buffers_;  // (K, columns) each
  std::array<Mark, 2> sent_;     // when each of two c may be overwritten
};

}  // namespace spamm::shards
