// The op spamm_shards: A and B lie in shards on several devices, and so does C.
//
// Norms travel first. They say which blocks of B each device needs, and only those are sent. Stages
// run over columns of C and never over K, so that every sum is computed as on one device.
#include <ATen/Functions.h>
#include <torch/library.h>

#include <algorithm>
#include <deque>
#include <optional>

#include "checks.h"
#include "ops.h"
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

using at::Tensor;
using at::TensorList;

namespace {

// The shards of one operand, checked.
struct Shards {
  std::vector<Tensor> rows;
  std::vector<int64_t> first;  // the first row of each shard, and the number of all rows
};

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

// Whether each device has the whole of B, and not one shard of its rows.
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

// The product, as it is computed step by step.
class ShardedProduct {
 public:
  ShardedProduct(TensorList a, TensorList b, const Block& block)
      : a_(shards_of(a, block.m, "a_shards")),
        b_is_whole_(is_whole_everywhere(b, a[0].size(1))),
        b_(b_is_whole_ ? Shards{b.vec(), {}} : shards_of(b, block.k, "b_shards")),
        whole_{.m = a_.first.back(),
               .k = a[0].size(1),
               .n = b[0].size(1),
               .block = block,
               .stage_blocks = stage_blocks(blocks_of(b[0].size(1), block.n), block.n)} {
    if (!b_is_whole_) {
      for (Tensor& rows : b_.rows) rows = with_contiguous_rows(rows);
    }
  }

  // Everything that needs no answer from a device is enqueued before the host waits in plan().
  std::vector<Tensor> run(const Knob& knob) {
    compute_norms();
    std::vector<Tensor> results;
    std::deque<Part> parts;
    for (size_t p = 0; p < a_.rows.size(); ++p) {
      const Tensor& a = a_.rows[p];
      results.push_back(at::empty({a.size(0), whole_.n}, a.options()));
      parts.emplace_back(whole_, a, norm_a_[p], norm_b_on(a.device()), results.back());
      if (!b_is_whole_) parts.back().prepare_stages(shards_for(p));
    }
    plan(knob);
    if (b_is_whole_) {
      for (size_t p = 0; p < parts.size(); ++p) parts[p].multiply(b_.rows[p]);
    } else {
      run_stages(parts);
    }
    return results;
  }

 private:
  // The map of B is computed in pieces, one a device, also if each device has the whole of B.
  void compute_norms() {
    const auto [m, k, n] = whole_.block;
    const int64_t parts = static_cast<int64_t>(a_.rows.size()), blocks = blocks_of(whole_.k, k);
    for (int64_t p = 0; p < parts; ++p) {
      const Tensor& b = b_.rows[p];
      const auto row_of = [&](int64_t part) {
        return std::min(whole_.k, blocks * part / parts * k);
      };
      auto [norm_a, norm_b] = ops::norm_maps(
          a_.rows[p], b_is_whole_ ? b.slice(0, row_of(p), row_of(p + 1)) : b, {m, k, n});
      norm_a_.push_back(std::move(norm_a));
      norm_b_.push_back(std::move(norm_b));
    }
  }

  // B's whole map on a device. Parts that share a device share it.
  const Tensor& norm_b_on(at::Device device) {
    for (const Tensor& map : gathered_norm_b_) {
      if (map.device() == device) return map;
    }
    return gathered_norm_b_.emplace_back(gather_rows(norm_b_, device));
  }

  // Finds tau and the needed units on the first device, and reads them.
  void plan(const Knob& knob) {
    if (b_is_whole_ && knob.tau && knob.tau->is_cpu()) {
      whole_.tau = *knob.tau;
      return;
    }
    const at::Device device = a_.rows[0].device();
    const auto on_lane = Lane::current(device).use();
    const Tensor& norm_b = norm_b_on(device);
    const Tensor tau = tau_on(device, norm_b, knob);
    std::vector<Tensor> wanted;
    if (!tau.is_cpu()) wanted.push_back(tau.to(at::kDouble));
    if (!b_is_whole_) {
      std::vector<Tensor> largest;
      for (const Tensor& map : norm_a_) {
        const auto on_its_lane = Lane::current(map.device()).use();
        largest.push_back(map.size(0) == 0 ? at::zeros({1, map.size(1)}, map.options())
                                           : map.amax(0, /*keepdim=*/true));
      }
      const Tensor needed =
          needed_units(gather_rows(largest, device), norm_b, tau, whole_.stage_blocks);
      wanted.push_back(needed.transpose(1, 2));
    }
    const std::vector<Tensor> read = read_together(wanted);
    whole_.tau = tau.is_cpu() ? tau : read[0];
    if (b_is_whole_) return;
    const Tensor& need = read.back();
    schedule_.emplace(need.size(0), need.size(1), need.size(2));
    std::copy_n(need.const_data_ptr<bool>(), need.numel(), schedule_->all().data());
  }

  // A number stays on the CPU, so that nothing waits for it.
  Tensor tau_on(at::Device device, const Tensor& norm_b, const Knob& knob) const {
    if (!knob.tau) return threshold_from_knob(gather_rows(norm_a_, device), norm_b, knob);
    return knob.tau->is_cpu()
               ? *knob.tau
               : knob.tau->to(device, knob.tau->scalar_type(), /*non_blocking=*/true);
  }

  // B's shards, the part's own one first and then those of the parts after it, so that not all
  // parts copy from the same device at the same time.
  std::vector<RowShard> shards_for(size_t part) const {
    std::vector<RowShard> shards;
    for (size_t step = 0; step < b_.rows.size(); ++step) {
      const size_t p = (part + step) % b_.rows.size();
      shards.push_back({b_.rows[p], b_.first[p]});
    }
    return shards;
  }

  void run_stages(std::deque<Part>& parts) {
    std::vector<std::vector<int64_t>> order;
    for (size_t p = 0; p < parts.size(); ++p) order.push_back(schedule_->order(p));
    for (int64_t turn = 0; turn < whole_.stages(); ++turn) {
      for (size_t p = 0; p < parts.size(); ++p) {
        const int64_t stage = order[p][turn];
        parts[p].run_stage(stage, std::as_const(*schedule_).need(p, stage));
      }
    }
  }

  Shards a_;
  bool b_is_whole_;
  Shards b_;
  WholeProduct whole_;
  std::vector<Tensor> norm_a_, norm_b_;  // of each device's rows
  std::deque<Tensor> gathered_norm_b_;
  std::optional<StageSchedule> schedule_;
};

std::vector<Tensor> spamm_shards_op(TensorList a, TensorList b, const std::optional<Tensor>& tau,
                                    std::optional<double> valid_ratio,
                                    std::optional<double> max_error, at::IntArrayRef block) {
  const Knob knob = {tau, valid_ratio, max_error};
  check_knob(knob);
  const Block edges = check_block(block);
  check_shards(a, b);
  if (tau) check_tau(*tau, tau->device());
  for (const Tensor& shard : a) refuse_capture(shard.device());
  if (a.size() == 1) {
    return {ops::spamm(a[0], b[0], tau, valid_ratio, max_error, block, {}, {}, {}, 1, 1, {})};
  }
  return ShardedProduct(a, b, edges).run(knob);
}

}  // namespace

TORCH_LIBRARY_IMPL(spamm_torch, CompositeExplicitAutograd, m) {
  m.impl("spamm_shards", &spamm_shards_op);
}

}  // namespace spamm::shards
