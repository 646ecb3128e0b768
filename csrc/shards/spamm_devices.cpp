// The op spamm with `devices`: A and B lie on one GPU, and so does C. The other GPUs fetch their
// rows of A and the stages of B, and send their rows of C back stage by stage.
#include "shards/spamm_devices.h"

#include <ATen/Functions.h>

#include <algorithm>
#include <deque>
#include <optional>
#include <tuple>

#include "checks.h"
#include "ops.h"
#include "shards/devices.h"
#include "shards/gather.h"
#include "shards/lane.h"
#include "shards/part.h"
#include "shards/plan.h"
#include "shards/plan_maps.h"
#include "shards/read_together.h"
#include "shards/row_copy.h"
#include "shards/schedule.h"
#include "threshold.h"

namespace spamm::shards {
namespace {

// Rows of C are cut between groups of this many, which is a multiple of every tile's height.
constexpr int64_t kGroupRows = 128;
constexpr int64_t kFetches = 16;  // copies of rows of A for a part, at most

// Groups of rows, from first to last without last.
struct Range {
  int64_t first, last;
};

template <class T>
std::span<const T> entries(const Tensor& x) {
  return {x.const_data_ptr<T>(), static_cast<size_t>(x.numel())};
}

// Computes rows of C on another device than the operands', and sends them there.
class RemotePart {
 public:
  RemotePart(const WholeProduct& whole, at::Device device, const Tensor& norm_a,
             const Tensor& norm_b, const Tensor& b, const Tensor& a, const Tensor& c)
      : result_(c),
        source_a_(a),
        a_(at::empty(a.sizes(), a.options().device(device))),
        norm_a_(gather_rows(norm_a, device)),
        norm_b_(gather_rows(norm_b, device)),
        part_(whole, a_, norm_a_, norm_b_, at::empty(c.sizes(), a_.options())),
        send_(Lane::another(device)) {
    part_.prepare_stages({{b, 0}});
    send_.wait_for(Lane::current(c.device()));
  }
  ~RemotePart() {
    // The result is complete on its own device, and the part's memory is not used any more.
    Lane::current(result_.device()).wait_for(send_);
    Lane::current(part_.device()).wait_for(send_);
  }
  RemotePart(const RemotePart&) = delete;

  // Fetches the blocks of A that some valid block product uses, and some others: for a few rows at
  // a time, all from the first needed block to the last. needed: (groups, KB), the stages in which
  // each group of kGroupRows rows needs each block row of B, as bits.
  void fetch_a(std::span<const int32_t> needed, int64_t edge) const {
    const int64_t rows = a_.size(0), blocks = blocks_of(a_.size(1), edge);
    const int64_t groups = blocks_of(rows, kGroupRows), step = blocks_of(groups, kFetches);
    std::vector<RowBlock> copies;
    for (int64_t group = 0; group < groups; group += step) {
      const int64_t count = std::min(step, groups - group);
      int64_t first = blocks, last = 0;
      for (int64_t i = group; i < group + count; ++i) {
        for (int64_t k = 0; k < blocks; ++k) {
          if (needed[i * blocks + k] == 0) continue;
          first = std::min(first, k), last = std::max(last, k + 1);
        }
      }
      if (first >= last) continue;
      const int64_t row = group * kGroupRows, column = first * edge;
      copies.push_back(block_between(a_, row, column, source_a_, row, column,
                                     std::min(rows - row, count * kGroupRows),
                                     std::min(a_.size(1), last * edge) - column));
    }
    copy_blocks(part_.pull(), part_.device(), source_a_.device(), copies);
  }

  void run_stage(int64_t stage, std::span<const bool> need, const WholeProduct& whole) {
    send_.wait_for(part_.run_stage(stage, need));
    const auto columns = [&](const Tensor& c) {
      return c.narrow(1, whole.first_column(stage), whole.columns(stage));
    };
    copy_rows(send_, columns(result_), columns(part_.c()));
  }

 private:
  Tensor result_, source_a_, a_, norm_a_, norm_b_;
  Part part_;
  Lane send_;
};

// For each group of kGroupRows rows of A and each block row of B: the stages in which the group
// needs it, as bits; int32 (groups, KB).
Tensor stages_needed_by_groups(const Tensor& norm_a, const Tensor& norm_b, const Tensor& tau,
                               int64_t group_blocks, int64_t stage_blocks) {
  const int64_t groups = blocks_of(norm_a.size(0), group_blocks);
  const int64_t missing = groups * group_blocks - norm_a.size(0);
  const Tensor padded = missing == 0 ? norm_a : at::constant_pad_nd(norm_a, {0, 0, 0, missing});
  const Tensor largest = padded.contiguous().view({groups, group_blocks, norm_a.size(1)}).amax(1);
  const Tensor needed = needed_units(largest, norm_b, tau, stage_blocks);
  const Tensor bits = at::arange(needed.size(2), needed.options().dtype(at::kInt));
  return at::bitwise_left_shift(needed.to(at::kInt), bits).sum(2, /*keepdim=*/false, at::kInt);
}

// What parts need of B, by what the groups of their rows need.
StageSchedule schedule_for(std::span<const int32_t> needed, std::span<const Range> parts,
                           int64_t stages, int64_t blocks) {
  StageSchedule schedule(static_cast<int64_t>(parts.size()), stages, blocks);
  std::vector<int32_t> any(blocks);
  for (size_t p = 0; p < parts.size(); ++p) {
    std::ranges::fill(any, 0);
    for (int64_t group = parts[p].first; group < parts[p].last; ++group) {
      for (int64_t k = 0; k < blocks; ++k) any[k] |= needed[group * blocks + k];
    }
    for (int64_t stage = 0; stage < stages; ++stage) {
      const std::span<bool> need = schedule.need(static_cast<int64_t>(p), stage);
      for (int64_t k = 0; k < blocks; ++k) need[k] = any[k] >> stage & 1;
    }
  }
  return schedule;
}

std::tuple<Tensor, Tensor> maps_of(const SpammArguments& arguments) {
  const auto& [a, b, knob, block, norm_a, norm_b, input, beta, alpha] = arguments;
  if (norm_a && norm_b) return {*norm_a, *norm_b};
  return {norm_a ? *norm_a : norm_map(a, {block[0], block[1]}),
          norm_b ? *norm_b : norm_map(b, {block[1], block[2]})};
}

void check_plain_product(const SpammArguments& arguments) {
  const Tensor& a = arguments.a;
  TORCH_CHECK(a.dim() == 2, "a product over several devices must be of two matrices; got shapes ",
              a.sizes(), " and ", arguments.b.sizes());
  TORCH_CHECK(!arguments.input,
              "a product over several devices must have no input to add; got one "
              "of shape ",
              arguments.input->sizes());
  TORCH_CHECK(arguments.alpha.equal(1),
              "a product over several devices must have a factor alpha of 1; got ",
              arguments.alpha.toDouble());
  TORCH_CHECK(a.is_cuda(),
              "operands of a product over several devices must be on a CUDA device; got ",
              a.device());
}

}  // namespace

Tensor spamm_on_devices(const SpammArguments& arguments, IntArrayRef device_numbers) {
  const auto& [a, b, knob, block_edges, given_a, given_b, input, beta, alpha] = arguments;
  const std::vector<at::Device> devices = check_devices(device_numbers);
  const Block block = check_product(a, b, block_edges, given_a, given_b, knob.tau, std::nullopt);
  check_plain_product(arguments);
  refuse_capture(a.device());
  const at::Device home = a.device();
  const auto on_home = Lane::current(home).use();
  const auto [norm_a, norm_b] = maps_of(arguments);
  const Tensor tau = threshold_from_knob(norm_a, norm_b, knob);
  const int64_t group_blocks = std::max<int64_t>(1, kGroupRows / block.m);
  WholeProduct whole{.m = a.size(0),
                     .k = a.size(1),
                     .n = b.size(1),
                     .block = block,
                     .stage_blocks = stage_blocks(norm_b.size(1), block.n)};
  const std::vector<Tensor> read = read_together(
      {tau.to(home), row_work(norm_a, norm_b, tau),
       stages_needed_by_groups(norm_a, norm_b, tau, group_blocks, whole.stage_blocks)});
  whole.tau = read[0];
  const std::vector<int64_t> cuts =
      row_cuts(entries<int64_t>(read[1]), static_cast<int64_t>(devices.size()), group_blocks);
  const auto needed = entries<int32_t>(read[2]);
  const int64_t blocks = norm_b.size(0);

  const Tensor source_a = with_contiguous_rows(a), source_b = with_contiguous_rows(b);
  const Tensor c = at::empty({whole.m, whole.n}, a.options());
  std::deque<RemotePart> remote;
  std::vector<Range> groups;  // of the remote parts
  std::optional<Part> own;
  for (size_t p = 0; p < devices.size(); ++p) {
    const int64_t row = cuts[p] * block.m, rows = std::min(whole.m, cuts[p + 1] * block.m) - row;
    if (rows <= 0) continue;
    const Tensor norm_a_rows = norm_a.slice(0, cuts[p], cuts[p + 1]);
    const Tensor c_rows = c.narrow(0, row, rows);
    if (devices[p] == home) {
      own.emplace(whole, a.narrow(0, row, rows), norm_a_rows, norm_b, c_rows);
    } else {
      remote.emplace_back(whole, devices[p], norm_a_rows, norm_b, source_b,
                          source_a.narrow(0, row, rows), c_rows);
      groups.push_back({cuts[p] / group_blocks, blocks_of(cuts[p + 1], group_blocks)});
    }
  }
  // First, because the host takes a while to enqueue the copies.
  if (own) own->multiply(b);
  const StageSchedule schedule = schedule_for(needed, groups, whole.stages(), blocks);
  std::vector<std::vector<int64_t>> order;
  for (size_t p = 0; p < remote.size(); ++p) {
    const auto [first, last] = groups[p];
    remote[p].fetch_a(needed.subspan(first * blocks, (last - first) * blocks), block.k);
    order.push_back(schedule.order(static_cast<int64_t>(p)));
  }
  for (int64_t turn = 0; turn < whole.stages(); ++turn) {
    for (size_t p = 0; p < remote.size(); ++p) {
      const int64_t stage = order[p][turn];
      remote[p].run_stage(stage, schedule.need(static_cast<int64_t>(p), stage), whole);
    }
  }
  return c;
}

}  // namespace spamm::shards
