// The op spamm_shards: A and B lie in shards on several devices, and so does C.
//
// Norms travel first. They say which blocks of B each device needs, and only those are sent. Stages
// run over columns of C and never over K, so that every sum is computed as on one device.
#include <ATen/Functions.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "arguments.h"
#include "checks.h"
#include "shards/part.h"
#include "shards/plan.h"
#include "threshold.h"

namespace spamm::shards {

using at::Tensor;
using at::TensorList;

namespace {

constexpr int64_t kTakenWhole = 32 << 20;  // bytes of B

// The shards of one operand. first: also the number of all rows.
Shards shards_of(TensorList tensors, int64_t edge, const char* name) {
  Shards shards{tensors.vec(), {0}};
  for (const Tensor& rows : tensors) shards.first.push_back(shards.first.back() + rows.size(0));
  for (const int64_t cut : shards.first) {
    TORCH_CHECK(cut % edge == 0 || cut == shards.first.back(), name,
                " must be cut at multiples of the block's edge ", edge, "; got a cut at row ", cut);
  }
  return shards;
}

void check_shard(const Tensor& shard, const Tensor& first, const char* name) {
  check_operand_dtype(shard.scalar_type(), name);
  TORCH_CHECK_TYPE(shard.scalar_type() == first.scalar_type(),
                   "all shards must have one dtype; got ", dtype_of(first), " and ",
                   dtype_of(shard));
  TORCH_CHECK(shard.dim() == 2 && shard.size(1) == first.size(1), name,
              " must be matrices (2-d) with one number of columns; got shapes ", first.sizes(),
              " and ", shard.sizes());
  TORCH_CHECK(shard.device().type() == first.device().type(),
              "all shards must be on CUDA devices or all on the CPU; got ", first.device(), " and ",
              shard.device());
}

// Tells whether each device has the whole of B, and not one shard of its rows.
bool is_whole_everywhere(TensorList b, int64_t k) {
  return std::all_of(b.begin(), b.end(), [&](const Tensor& x) { return x.size(0) == k; });
}

void check_shards(TensorList a, TensorList b) {
  TORCH_CHECK_VALUE(!a.empty(), "a_shards must hold at least one tensor; got none");
  TORCH_CHECK_VALUE(b.size() == a.size(), "b_shards must hold as many tensors as a_shards, ",
                    a.size(), "; got ", b.size());
  for (const Tensor& shard : a) check_shard(shard, a[0], "a_shards");
  for (const Tensor& shard : b) check_shard(shard, b[0], "b_shards");
  TORCH_CHECK_TYPE(a[0].scalar_type() == b[0].scalar_type(), "all shards must have one dtype; got ",
                   dtype_of(a[0]), " and ", dtype_of(b[0]));
  const int64_t k = a[0].size(1);
  int64_t rows = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    TORCH_CHECK(a[i].device() == b[i].device(),
                "a_shards and b_shards must lie on the same devices "
                "in the same order; got ",
                a[i].device(), " and ", b[i].device(), " at ", i);
    rows += b[i].size(0);
  }
  TORCH_CHECK(rows == k || is_whole_everywhere(b, k), "b_shards must have ", k,
              " rows together, or each, as a_shards have ", k, " columns; got ", rows, " together");
}

// On one device. A number stays on the CPU, so that nothing waits for it.
Tensor tau_on(at::Device device, const Tensor& tau) {
  return tau.is_cpu() ? tau : tau.to(device, tau.scalar_type(), /*non_blocking=*/true);
}

std::vector<Tensor> multiply_shards(TensorList a, TensorList b, const Knob& knob,
                                    const Block& block) {
  const int64_t m = shards_of(a, block.m, "a_shards").first.back();
  const bool is_whole = is_whole_everywhere(b, a[0].size(1));
  Shards shards = is_whole ? Shards{b.vec(), {}} : shards_of(b, block.k, "b_shards");
  if (!is_whole) std::ranges::transform(shards.rows, shards.rows.begin(), with_contiguous_rows);
  const WholeProduct whole(a[0], m, b[0], block);
  const auto count = std::ssize(a);

  // The map of B is computed in pieces, one a device, also if each device has the whole of B.
  std::vector<Tensor> norm_a, norm_b, results(count);
  std::vector<Mark> ready;  // when both are computed
  for (int64_t p = 0; p < count; ++p) {
    const auto row_of = [&](int64_t part) { return equal_cut(whole.k, block.k, part, count); };
    auto [map_a, map_b] =
        ops::norm_maps(a[p], is_whole ? b[p].slice(0, row_of(p), row_of(p + 1)) : shards.rows[p],
                       {block.m, block.k, block.n});
    norm_a.push_back(std::move(map_a)), norm_b.push_back(std::move(map_b));
    ready.push_back(Lane::current(a[p].device()).mark());
  }

  // All of a small B travels to each part, which takes less time than to read what is needed.
  // SPAMM_TORCH_PLAN_SHARDS=1 reads it all the same, for tests.
  const bool is_small = whole.k * whole.n * whole.entry_bytes <= kTakenWhole;
  const bool takes_all = is_small && !a[0].is_cpu() && !is_set("SPAMM_TORCH_PLAN_SHARDS");
  // Bool (stages, KB), on the CPU. Waits for the device once.
  const auto needed = [&](int64_t p, const Tensor& map_b, const Tensor& tau) {
    if (takes_all) return at::ones({whole.stages(), map_b.size(0)}, at::kBool);
    const Tensor largest = norm_a[p].amax(0, /*keepdim=*/true);
    return needed_units(largest, map_b, tau, whole.stage_blocks)[0].cpu().t().contiguous();
  };
  // Parts outlive the threads: when they end, streams of other devices wait for their copies.
  std::vector<std::optional<Part>> parts(count);
  // Everything that needs no answer from the device is enqueued before the host waits for it. Every
  // device searches by itself, and all find the same tau.
  const auto run_part = [&](int64_t p) {
    const at::Device device = a[p].device();
    const auto on_device = Lane::current(device).use();
    const Tensor map_b = gather_rows(norm_b, ready, device);
    const Tensor c = results[p] = at::empty({a[p].size(0), whole.n}, a[p].options());
    if (!is_whole) {
      Part& part = parts[p].emplace(whole, device, kPullLane, shards, p);
      part.take_norms(map_b);
      part.take_buffers(c.options());
      part.lanes().start();
      // Not for the streams of the shards, which by now may have multiplies of other parts.
      for (const Mark& mark : ready) part.lanes().pull().wait_for(mark);
    }
    const Tensor tau = knob.tau
                           ? tau_on(device, *knob.tau)
                           : threshold_from_knob(gather_rows(norm_a, ready, device), map_b, knob);
    if (is_whole) {
      multiply_part(a[p], b[p], norm_a[p], map_b, tau, whole, c);
    } else if (c.numel() > 0) {
      parts[p]->run({a[p], norm_a[p], {c}}, needed(p, map_b, tau), tau);
    }
  };
  // A thread does not pay where a part takes the host little time: nothing is searched for, and no
  // norms are read.
  if (a[0].is_cpu() || ((is_whole || takes_all) && knob.tau && knob.tau->is_cpu())) {
    for (int64_t p = 0; p < count; ++p) run_part(p);
  } else {
    std::vector<at::Device> devices;
    for (const Tensor& rows : a) devices.push_back(rows.device());
    if (knob.tau && !knob.tau->is_cpu()) devices.push_back(knob.tau->device());  // it is copied
    for_each_part(count, devices, run_part);
  }
  return results;
}

std::vector<Tensor> spamm_shards_op(ProductShardsArguments& x) {
  const TensorList a = x.a, b = x.b;
  const Knob knob = checked_knob(x.knob);
  const Block edges = check_block(x.block);
  check_shards(a, b);
  if (knob.tau) check_tau(*knob.tau, knob.tau->device());
  for (const Tensor& shard : a) refuse_capture(shard.device());
  if (a.size() == 1) return {ops::spamm({{.knob = knob, .block = x.block}, a[0], b[0]})};
  return multiply_shards(a, b, knob, edges);
}

}  // namespace

TORCH_LIBRARY_IMPL(spamm_torch, CompositeExplicitAutograd, m) {
  m.impl("spamm_shards", boxed<&spamm_shards_op>());
}

}  // namespace spamm::shards
