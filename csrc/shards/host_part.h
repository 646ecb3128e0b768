// One part of a product whose operands lie in host memory: what one device reads, computes and
// sends back.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <deque>
#include <future>
#include <optional>

#include "shards/host_reader.h"
#include "shards/lane.h"
#include "shards/part.h"

namespace spamm::shards {

// What all parts share.
struct HostProduct {
  WholeProduct whole;
  HostMatrix a, b;
  at::Tensor c;                              // in host memory
  at::Tensor tau = {};                       // 0-d, on the CPU
  std::optional<at::Tensor> norm_a, norm_b;  // whole maps, on any device; computed if absent
  int64_t parts;
  int64_t ring_bytes;  // of a piece of pinned memory; 0 if none is needed
};

// Works on one panel after the other: some rows of A, which stay while all stages of B pass. Each
// part reads only its rows of a stage from the host and pulls the others from the other parts.
//
// A step is one stage of one panel; steps count on from panel to panel. For each step, every part
// calls read_stage, then every part finish_reading, then every part pull_stage, then multiply_stage
// in the same order: each of them enqueues, and waits on lanes for marks of those before. Reads may
// be up to kBuffers steps ahead of the rest.
//
// Lanes: the reader's, `pull` from other parts, two that multiply in turns, and `send`. One of the
// two is the device's current stream.
class HostPart {
 public:
  static constexpr int kBuffers = 3;  // stages of B

  struct Step {
    int64_t number, stage;
  };

  // most_rows: of a panel. Allocates all buffers; throws OutOfMemoryError before any copy.
  HostPart(const HostProduct& product, at::Device device, int64_t number, int64_t most_rows);
  HostPart(const HostPart&) = delete;

  // Rows of C from `row` on; may be none.
  void read_panel(int64_t row, int64_t rows);
  void finish_reading_panel();

  void read_stage(const Step& step, const std::deque<HostPart>& parts);
  void finish_reading(const Step& step);
  void pull_stage(const Step& step, const std::deque<HostPart>& parts);
  void multiply_stage(const Step& step);

  // Reads nothing more.
  void stop() { reader_.stop(); }
  // The host goes on once everything is done that has been enqueued.
  void wait_on_host() const;

 private:
  at::Device device() const { return pull_.device(); }
  std::array<const Lane*, 5> lanes() const;
  int64_t buffer_bytes() const;
  // The rows of B that the part reads: from first_row(number) to first_row(number + 1).
  int64_t first_row(int64_t number) const;
  int64_t rows_of_b() const { return first_row(number_ + 1) - first_row(number_); }
  at::Tensor stage_buffer(const Step& step) const;
  at::Tensor own_rows(const at::Tensor& stage) const;
  at::Tensor norms_of_stage(const Step& step, const at::Tensor& stage) const;

  const HostProduct& product_;
  int64_t number_, most_rows_;
  Lane pull_;
  std::array<Lane, 2> multiply_;
  Lane send_;
  at::Tensor a_, norm_a_, whole_norm_a_, whole_norm_b_;
  std::array<at::Tensor, kBuffers> stages_;
  std::array<at::Tensor, 2> c_;  // one for each lane that multiplies
  int64_t row_ = 0, rows_ = 0;   // of the panel
  std::future<Mark> reading_panel_;
  std::array<std::future<Mark>, kBuffers> reading_;
  std::array<Mark, kBuffers> read_, pulled_, multiplied_;  // of the stage in each buffer
  std::array<Mark, 2> sent_;
  HostReader reader_;  // the last member: its thread uses marks above
};

}  // namespace spamm::shards
