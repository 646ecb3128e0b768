// Operands stream through the devices. What decides the time is the link between host and device:
// each byte crosses it once, and devices pass on to each other what they have read.
#include <ATen/ops/empty.h>

#include <algorithm>
#include <deque>

#include "checks.h"
#include "shards/host_part.h"
#include "shards/host_reader.h"
#include "shards/plan.h"
#include "shards/row_copy.h"
#include "shards/spamm_devices.h"
#include "threshold.h"

namespace spamm::shards {
namespace {

// Shorter rows cross the link to the host at less than its full speed.
constexpr int64_t kLeastRowBytes = 8192;

// Panels are cut between groups of kCutRows rows.
int64_t groups_of(const WholeProduct& whole) { return blocks_of(whole.m, kCutRows); }

// The run of a product in so many panels.
class HostRun {
 public:
  HostRun(const HostProduct& product, const std::vector<at::Device>& devices, int64_t panels)
      : product_(product), panels_(panels) {
    int64_t most_rows = 0;
    for (int64_t piece = 0; piece < panels * product.parts; ++piece) {
      most_rows = std::max(most_rows, first_row(piece + 1) - first_row(piece));
    }
    for (int64_t p = 0; p < product.parts; ++p) {
      parts_.emplace_back(product, devices[p], p, most_rows);
    }
  }
  // Ends the use of all memory, the host's and the devices', before any of it is released.
  ~HostRun() {
    for (HostPart& part : parts_) part.stop();
    try {
      for (const HostPart& part : parts_) part.wait_on_host();
    } catch (const c10::Error&) {
      // The device has failed, and the error that says so is on its way.
    }
  }
  HostRun(const HostRun&) = delete;

  void run() {
    for (int64_t panel = 0; panel < panels_; ++panel) run_panel(panel);
    for (const HostPart& part : parts_) part.wait_on_host();
  }

 private:
  // Equal shares of the rows of C, one for each part in each panel.
  int64_t first_row(int64_t piece) const {
    const WholeProduct& whole = product_.whole;
    const int64_t group = groups_of(whole) * piece / (panels_ * product_.parts);
    return std::min(whole.m, group * kCutRows);
  }

  void run_panel(int64_t panel) {
    int64_t piece = panel * product_.parts;
    for (HostPart& part : parts_) {
      const int64_t row = first_row(piece++);
      part.read_panel(row, first_row(piece) - row);
    }
    const int64_t stages = product_.whole.stages();
    for (int64_t stage = 0; stage < HostPart::kBuffers; ++stage) read_stage(panel, stage);
    for (HostPart& part : parts_) part.finish_reading_panel();
    for (int64_t stage = 0; stage < stages; ++stage) {
      const HostPart::Step step = {panel * stages + stage, stage};
      for (HostPart& part : parts_) part.finish_reading(step);
      for (HostPart& part : parts_) part.pull_stage(step, parts_);
      for (HostPart& part : parts_) part.multiply_stage(step);
      read_stage(panel, stage + HostPart::kBuffers);
    }
  }

  void read_stage(int64_t panel, int64_t stage) {
    const int64_t stages = product_.whole.stages();
    if (stage >= stages) return;
    for (HostPart& part : parts_) part.read_stage({panel * stages + stage, stage}, parts_);
  }

  const HostProduct& product_;
  int64_t panels_;
  std::deque<HostPart> parts_;
};

HostMatrix host_matrix(const Tensor& x, const HostSizes& sizes) {
  const Tensor rows = with_contiguous_rows(x);
  return {rows, sizes.is_pinned ? *sizes.is_pinned : rows.is_pinned()};
}

int64_t bytes_of_row(const HostMatrix& x) { return x.rows.size(1) * x.rows.element_size(); }

}  // namespace

Tensor spamm_from_host(const ProductArguments& given, const std::vector<at::Device>& devices,
                       const HostSizes& sizes) {
  const Tensor &a = given.a, &b = given.b;
  const Block block = check_block(given.block);
  for (const at::Device device : devices) refuse_capture(device);
  const int64_t k = a.size(1), n = b.size(1);
  const int64_t least_blocks = blocks_of(kLeastRowBytes, a.element_size() * block.n);
  HostProduct product = {
      .whole = {.m = a.size(0),
                .k = k,
                .n = n,
                .block = block,
                .stage_blocks = sizes.stage_blocks.value_or(
                    std::max(least_blocks, stage_blocks(blocks_of(n, block.n), block.n)))},
      .a = host_matrix(a, sizes),
      .b = host_matrix(b, sizes),
      .c = at::empty({a.size(0), n}, a.options().pinned_memory(!devices[0].is_cpu())),
      .norm_a = given.norm_a,
      .norm_b = given.norm_b,
      .parts = static_cast<int64_t>(devices.size()),
      .ring_bytes = 0};
  if (product.c.numel() == 0) return product.c;
  if (!product.a.is_pinned || !product.b.is_pinned) {
    product.ring_bytes =
        std::max({sizes.piece_bytes, bytes_of_row(product.a), bytes_of_row(product.b)});
  }
  if (given.knob.tau) {
    product.tau = *given.knob.tau;
  } else {
    const auto map_of = [&](const OptTensor& map, const HostMatrix& x,
                            std::array<int64_t, 2> edges) {
      return map ? map->to(devices[0])
                 : norm_map_from_host(x, edges, devices, sizes.piece_bytes, product.ring_bytes);
    };
    const auto on_first = Lane::current(devices[0]).use();
    product.norm_a = map_of(given.norm_a, product.a, {block.m, block.k});
    product.norm_b = map_of(given.norm_b, product.b, {block.k, block.n});
    product.tau = threshold_from_knob(*product.norm_a, *product.norm_b, given.knob).cpu();
  }
  for (int64_t panels = sizes.panels;; panels *= 2) {
    try {
      HostRun(product, devices, panels).run();
      return product.c;
    } catch (const c10::OutOfMemoryError&) {
      if (panels * product.parts >= groups_of(product.whole)) throw;
    }
  }
}

}  // namespace spamm::shards
