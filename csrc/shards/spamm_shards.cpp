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
#include "shards/devices.h"
#include "shards/for_each_part.h"
#include "shards/part.h"
#include "shards/plan.h"
#include "threshold.h"

namespace spamm::shards {

using at::Tensor;
using at::TensorList;

namespace {

constexpr int64_t kTakenWhole = 32 << 20;  // bytes of B

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

// Rows of C, computed on one device from rows of A. B comes stage by stage: a stage's needed units
// are copied from other devices into one of a few buffers while the stage before is multiplied.
class Part {
 public:
  // norm_a: the map of `a`. norm_b: the whole map of B. c: (rows, N). All on one device. `b` holds
  // all rows of B. If the first shard lies on this device, it is multiply_part's own_rows: read in
  // place where the kernel can, else copied there. ready: when B's shards have been written.
  //
  // Allocates the buffers of stages. Throws OutOfMemoryError before any copy has started.
  Part(const WholeProduct& whole, const Tensor& a, const Tensor& norm_a, const Tensor& norm_b,
       const Tensor& c, std::vector<RowShard> b, std::span<const Mark> ready)
      : whole_(whole),
        a_(a),
        norm_a_(norm_a),
        c_(c),
        b_(std::move(b)),
        lanes_(c.device(), /*sends=*/false) {
    for (const RowShard& shard : b_) sources_.push_back(Lane::current(shard.rows.device()));
    stage_norms_ = in_stages(norm_b, whole_.stage_blocks).permute({1, 0, 2}).contiguous();
    const int64_t columns = aligned(whole_.columns(0));
    buffers_.resize(std::min(kBuffers, whole_.stages()));
    naming_memory(
        [&] {
          for (Tensor& buffer : buffers_) buffer = at::empty({whole_.k, columns}, a_.options());
        },
        "a product over several devices needs ",
        std::ssize(buffers_) * whole_.k * columns * whole_.entry_bytes, " bytes on ", c.device(),
        " for stages of B");
    lanes_.start();
    // Not for the streams of the shards, which by now may have multiplies of other parts.
    for (const Mark& mark : ready) lanes_.pull().wait_for(mark);
  }
  // The current streams of the devices that B came from wait for the copies, too.
  ~Part() { lanes_.end(sources_); }
  Part(const Part&) = delete;

  // need: bool (stages, KB), on the CPU.
  void run(const Tensor& need, const Tensor& tau) {
    tau_ = tau;
    lanes_.multiply(1).wait_for(lanes_.own());  // on which tau has been found since
    const auto need_of = [&](int64_t stage) {
      return std::span(need.const_data_ptr<bool>() + stage * need.size(1),
                       static_cast<size_t>(need.size(1)));
    };
    std::vector<int64_t> counts;
    counts.reserve(static_cast<size_t>(need.size(0)));
    for (int64_t stage = 0; stage < need.size(0); ++stage) {
      counts.push_back(std::ranges::count(need_of(stage), true));
    }
    for (const int64_t stage : stage_order(counts)) run_stage(stage, need_of(stage));
  }

 private:
  static constexpr int64_t kBuffers = 3;

  bool owns(const RowShard& shard) const {
    return &shard == &b_.front() && shard.rows.device() == c_.device();
  }

  // Copies the needed units of the stage and multiplies. need: for each block row of B.
  void run_stage(int64_t stage, std::span<const bool> need) {
    const int64_t slot = runs_ % kBuffers;
    const Lane& lane = lanes_.multiply(multiply_lane(tau_, runs_++));
    const Tensor buffer = buffers_[slot].narrow(1, 0, whole_.columns(stage));
    lanes_.pull().wait_for(multiplied_[slot]);
    for (const RowShard& shard : b_) {
      if (owns(shard)) continue;
      copy_blocks(lanes_.pull(), c_.device(), shard.rows.device(),
                  unit_copies(whole_, stage, need, shard, buffer, 0));
    }
    lane.wait_for(lanes_.pull());
    const auto on_lane = lane.use();
    const auto columns_of = [&](const Tensor& x) {
      return x.narrow(1, whole_.first_column(stage), whole_.columns(stage));
    };
    const RowShard& own = b_.front();
    const int64_t blocks = blocks_of(whole_.columns(stage), whole_.block.n);
    multiply_part(a_, buffer, norm_a_, stage_norms_.select(0, stage).narrow(1, 0, blocks), tau_,
                  whole_, columns_of(c_),
                  owns(own) ? std::optional(columns_of(own.rows)) : std::nullopt, own.first);
    multiplied_[slot] = lane.mark();
  }

  const WholeProduct& whole_;
  Tensor a_, norm_a_, c_;
  Tensor tau_;  // kept, as lanes read it up to the end
  std::vector<RowShard> b_;
  std::vector<Lane> sources_;  // of the shards of B
  Lanes lanes_;
  Tensor stage_norms_;  // B's norms of each stage, contiguous; (stages, KB, stage_blocks)
  std::vector<Tensor> buffers_;
  std::array<Mark, kBuffers> multiplied_;  // when each buffer may be overwritten
  int64_t runs_ = 0;                       // stages so far
};

// The product, as it is computed step by step.
class ShardedProduct {
 public:
  ShardedProduct(TensorList a, TensorList b, const Block& block)
      : a_(shards_of(a, block.m, "a_shards")),
        b_is_whole_(is_whole_everywhere(b, a[0].size(1))),
        b_(b_is_whole_ ? Shards{b.vec(), {}} : shards_of(b, block.k, "b_shards")),
        whole_(a[0], a_.first.back(), b[0], block) {
    if (!b_is_whole_) {
      for (Tensor& rows : b_.rows) rows = with_contiguous_rows(rows);
    }
  }

  std::vector<Tensor> run(const Knob& knob) {
    compute_norms();
    std::vector<Tensor> results(a_.rows.size());
    // Parts outlive the threads: when they end, streams of other devices wait for their copies.
    std::vector<std::optional<Part>> parts(results.size());
    const auto run_part = [&](int64_t p) { results[p] = this->run_part(p, parts[p], knob); };
    const auto count = static_cast<int64_t>(parts.size());
    if (a_.rows[0].is_cpu() || is_soon_enqueued(knob)) {
      for (int64_t p = 0; p < count; ++p) run_part(p);
    } else {
      std::vector<at::Device> devices;
      devices.reserve(a_.rows.size());
      for (const Tensor& a : a_.rows) devices.push_back(a.device());
      for_each_part(count, current_streams(devices), run_part);
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
      ready_.push_back(Lane::current(b.device()).mark());
    }
  }

  // Whether all of B travels to each part, which takes less time than to read what is needed.
  // SPAMM_TORCH_PLAN_SHARDS=1 reads it all the same, for tests.
  bool takes_all() const {
    const bool is_small = whole_.k * whole_.n * whole_.entry_bytes <= kTakenWhole;
    return is_small && !a_.rows[0].is_cpu() && !is_set("SPAMM_TORCH_PLAN_SHARDS");
  }

  // Whether a part takes the host so little time that a thread does not pay: nothing is searched
  // for, and no norms are read.
  bool is_soon_enqueued(const Knob& knob) const {
    return (b_is_whole_ || takes_all()) && knob.tau && knob.tau->is_cpu();
  }

  // Everything that needs no answer from the device is enqueued before the host waits for it.
  Tensor run_part(int64_t p, std::optional<Part>& part, const Knob& knob) const {
    const Tensor& a = a_.rows[p];
    const auto on_device = Lane::current(a.device()).use();
    const Tensor norm_b = gather_rows(norm_b_, ready_, a.device());
    const Tensor c = at::empty({a.size(0), whole_.n}, a.options());
    if (!b_is_whole_) part.emplace(whole_, a, norm_a_[p], norm_b, c, shards_for(p), ready_);
    const Tensor tau = tau_on(a.device(), norm_b, knob);
    if (b_is_whole_) {
      multiply_part(a, b_.rows[p], norm_a_[p], norm_b, tau, whole_, c);
    } else if (c.numel() > 0) {
      part->run(takes_all() ? at::ones({whole_.stages(), norm_b.size(0)}, at::kBool)
                            : needed(norm_a_[p], norm_b, tau),
                tau);
    }
    return c;
  }

  // Returns the units that a part needs: bool (stages, KB), on the CPU. Waits for the device once.
  Tensor needed(const Tensor& norm_a, const Tensor& norm_b, const Tensor& tau) const {
    const Tensor largest = norm_a.amax(0, /*keepdim=*/true);
    return needed_units(largest, norm_b, tau, whole_.stage_blocks)[0].cpu().t().contiguous();
  }

  // Every device searches by itself, and all find the same tau. A number stays on the CPU, so that
  // nothing waits for it.
  Tensor tau_on(at::Device device, const Tensor& norm_b, const Knob& knob) const {
    if (!knob.tau) return threshold_from_knob(gather_rows(norm_a_, ready_, device), norm_b, knob);
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

  Shards a_;
  bool b_is_whole_;
  Shards b_;
  WholeProduct whole_;
  std::vector<Tensor> norm_a_, norm_b_;  // of each device's rows
  std::vector<Mark> ready_;              // when both are computed
};

std::vector<Tensor> spamm_shards_op(ProductShardsArguments& x) {
  const TensorList a = x.a, b = x.b;
  const Knob knob = checked_knob(x.knob);
  const Block edges = check_block(x.block);
  check_shards(a, b);
  if (knob.tau) check_tau(*knob.tau, knob.tau->device());
  for (const Tensor& shard : a) refuse_capture(shard.device());
  if (a.size() == 1) return {ops::spamm({{.knob = knob, .block = x.block}, a[0], b[0]})};
  return ShardedProduct(a, b, edges).run(knob);
}

}  // namespace

TORCH_LIBRARY_IMPL(spamm_torch, CompositeExplicitAutograd, m) {
  m.impl("spamm_shards", boxed<&spamm_shards_op>());
}

}  // namespace spamm::shards
