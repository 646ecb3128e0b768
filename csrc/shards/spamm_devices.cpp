// The op spamm with `devices`: A and B lie on one GPU, and so does C. The other GPUs fetch their
// rows of A and the stages of B, and send their rows of C back stage by stage.
#include "shards/spamm_devices.h"

#include <ATen/Functions.h>

#include <algorithm>
#include <deque>
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

  // Fetches the blocks of A that some valid block product uses. needed: (groups, KB).
  void fetch_a(const Tensor& needed, int64_t edge) const {
    const int64_t groups = needed.size(0), blocks = needed.size(1);
    const auto row = [&](int64_t group) {
      return std::span(needed[group].const_data_ptr<bool>(), static_cast<size_t>(blocks));
    };
    for (int64_t group = 0, next; group < groups; group = next) {
      next = group + 1;
      while (next < groups && std::ranges::equal(row(group), row(next))) ++next;
      const int64_t first = group * kGroupRows;
      const int64_t rows = std::min(a_.size(0), next * kGroupRows) - first;
      for (const Run& run : runs_of(row(group), 0, blocks)) {
        const int64_t from = run.first * edge;
        const int64_t columns = std::min(a_.size(1), from + run.count * edge) - from;
        const auto part_of = [&](const Tensor& x) {
          return x.narrow(0, first, rows).narrow(1, from, columns);
        };
        copy_rows(part_.pull(), part_of(a_), part_of(source_a_));
      }
    }
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

// For each group of kGroupRows rows of A: the units of B that it needs, (groups, KB, stages).
Tensor needed_by_groups(const Tensor& norm_a, const Tensor& norm_b, const Tensor& tau,
                        int64_t group_blocks, int64_t stage_blocks) {
  const int64_t groups = blocks_of(norm_a.size(0), group_blocks);
  const Tensor padded =
      at::constant_pad_nd(norm_a, {0, 0, 0, groups * group_blocks - norm_a.size(0)});
  const Tensor largest = padded.view({groups, group_blocks, norm_a.size(1)}).amax(1);
  return needed_units(largest, norm_b, tau, stage_blocks);
}

std::tuple<Tensor, Tensor> maps_of(const SpammArguments& arguments) {
  const auto& [a, b, knob, block, norm_a, norm_b, input, beta, alpha] = arguments;
  if (norm_a && norm_b) return {*norm_a, *norm_b};
  return {norm_a ? *norm_a : norm_map(a, {block[0], block[1]}),
          norm_b ? *norm_b : norm_map(b, {block[1], block[2]})};
}

}  // namespace

Tensor spamm_on_devices(const SpammArguments& arguments, IntArrayRef device_numbers) {
  const auto& [a, b, knob, block_edges, given_a, given_b, input, beta, alpha] = arguments;
  const std::vector<at::Device> devices = check_devices(device_numbers);
  const Block block = check_product(a, b, block_edges, given_a, given_b, knob.tau, std::nullopt);
  TORCH_CHECK(a.dim() == 2 && !input && alpha.equal(1),
              "a product over several devices must be a plain product of two matrices; got "
              "operands of shapes ",
              a.sizes(), " and ", b.sizes(), input ? " and an input to add" : "");
  TORCH_CHECK(a.is_cuda(),
              "operands of a product over several devices must be on a CUDA device; "
              "got ",
              a.device());
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
  const std::vector<Tensor> read =
      read_together({tau.to(home), row_work(norm_a, norm_b, tau),
                     needed_by_groups(norm_a, norm_b, tau, group_blocks, whole.stage_blocks)});
  whole.tau = read[0];
  const std::vector<int64_t> cuts =
      row_cuts({read[1].const_data_ptr<int64_t>(), static_cast<size_t>(read[1].numel())},
               static_cast<int64_t>(devices.size()), group_blocks);

  const Tensor source_a = with_contiguous_rows(a), source_b = with_contiguous_rows(b);
  const Tensor c = at::empty({whole.m, whole.n}, a.options());
  std::deque<RemotePart> remote;
  std::vector<Tensor> needed_a, needed_b;
  for (size_t p = 0; p < devices.size(); ++p) {
    if (devices[p] == home || cuts[p] == cuts[p + 1]) continue;
    const int64_t row = cuts[p] * block.m, rows = std::min(whole.m, cuts[p + 1] * block.m) - row;
    const Tensor groups =
        read[2].slice(0, cuts[p] / group_blocks, blocks_of(cuts[p + 1], group_blocks));
    const auto on_device = Lane::current(devices[p]).use();
    remote.emplace_back(whole, devices[p], norm_a.slice(0, cuts[p], cuts[p + 1]), norm_b, source_b,
                        source_a.narrow(0, row, rows), c.narrow(0, row, rows));
    needed_a.push_back(groups.any(2));
    needed_b.push_back(groups.any(0));
  }
  // Before the copies, which take the host a while to enqueue.
  for (size_t p = 0; p < devices.size(); ++p) {
    if (devices[p] != home || cuts[p] == cuts[p + 1]) continue;
    const int64_t row = cuts[p] * block.m, rows = std::min(whole.m, cuts[p + 1] * block.m) - row;
    Part(whole, a.narrow(0, row, rows), norm_a.slice(0, cuts[p], cuts[p + 1]), norm_b,
         c.narrow(0, row, rows))
        .multiply(b);
  }
  if (!remote.empty()) {
    for (size_t p = 0; p < remote.size(); ++p) remote[p].fetch_a(needed_a[p], block.k);
    const StageSchedule schedule(at::stack(needed_b));
    for (int64_t turn = 0; turn < schedule.stages(); ++turn) {
      for (size_t p = 0; p < remote.size(); ++p) {
        const int64_t stage = schedule.stage(p, turn);
        remote[p].run_stage(stage, schedule.need(p, stage), whole);
      }
    }
  }
  return c;
}

}  // namespace spamm::shards
