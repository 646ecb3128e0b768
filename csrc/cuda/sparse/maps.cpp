// The ops of block-sparse norm maps on CUDA: plans, thresholds and what is dropped. The host waits
// once for the sizes of a plan, and for the number of blocks that stay.
#include "cuda/sparse/maps.h"

#include <c10/cuda/CUDACachingAllocator.h>

#include "cuda/operand.h"

namespace spamm::cuda {
namespace {

using at::Tensor;
using kernels::CsrFindings;
using kernels::CsrMaps;
using kernels::RowCounts;

// The bytes that the device's memory still takes, where so much is needed that asking pays.
std::optional<double> free_bytes(double needed, const OnDevice& device, at::Device of) {
  if (needed < static_cast<double>(device.properties().totalGlobalMem) / 16) return std::nullopt;
  size_t free = 0, total = 0;
  C10_CUDA_CHECK(cudaMemGetInfo(&free, &total));
  const auto stats = c10::cuda::CUDACachingAllocator::getDeviceStats(of.index());
  return static_cast<double>(static_cast<int64_t>(free) + stats.reserved_bytes[0].current -
                             stats.allocated_bytes[0].current);
}

// Raises what the CPU's op raises for these patterns.
void refuse(const BsrPlanArguments& x) {
  BsrMaps maps = x;
  for (Tensor* each :
       {&maps.crow_a, &maps.col_a, &maps.norm_a, &maps.crow_b, &maps.col_b, &maps.norm_b}) {
    *each = each->cpu();
  }
  const CheckedMaps checked(maps);
  if (x.crow_input) Pattern(x.crow_input->cpu(), x.col_input->cpu(), x.columns, "input");
}

// Memory of what the kernels count and find, in one tensor of zeros.
class Workspace {
 public:
  Workspace(int64_t rows, const at::TensorOptions& options)
      : rows_(rows),
        zeros_(at::zeros({2 * bytes_of<RowCounts>(rows + 1) + bytes_of<CsrFindings>(1) +
                          bytes_of<unsigned>(rows + 1)},
                         options.dtype(at::kByte))) {}

  RowCounts* counts() const { return static_cast<RowCounts*>(zeros_.mutable_data_ptr()); }
  RowCounts* before() const { return counts() + rows_ + 1; }
  CsrFindings* findings() const { return reinterpret_cast<CsrFindings*>(before() + rows_ + 1); }
  unsigned* arrived() const { return reinterpret_cast<unsigned*>(findings() + 1); }
  unsigned* mirrors_written() const { return arrived() + 1; }

 private:
  template <class T>
  static int64_t bytes_of(int64_t count) {
    return count * static_cast<int64_t>(sizeof(T));
  }

  int64_t rows_;
  Tensor zeros_;
};

template <class Norm>
BsrPlan plan_of(const BsrPlanArguments& x, kernels::PlanParams<Norm> params,
                const OnDevice& device) {
  const int64_t rows = params.maps.a.rows;
  const HostResult<kernels::PlanTotals> totals;
  params.totals = totals.on_device();
  CsrKernels<Norm>::plan(PlanStep::kCount, params, device.properties(), device.stream());
  const auto [all, findings] = totals.wait(device.stream());
  if (findings.is_bad) refuse(x);
  const auto products = static_cast<int64_t>(all.products);
  const double needed = x.needed_bytes(all.stored(), products);
  const std::optional<double> free = x.free_bytes ? std::optional<double>(*x.free_bytes)
                                                  : free_bytes(needed, device, x.norm_a.device());
  const bool lists = x.lists && (x.block_bytes == 0 || !free || needed <= *free);
  const auto options = x.norm_a.options(), index = options.dtype(at::kLong);
  const auto made = [&](int64_t size) {
    return rows > 0 ? at::empty({size}, index) : at::zeros({size}, index);
  };
  const Tensor crow = made(rows + 1), col = made(all.stored()), first = made(all.stored() + 1);
  const Tensor slots_a = at::empty({lists ? products : 0}, options.dtype(at::kInt));
  const Tensor slots_b = at::empty_like(slots_a);
  if (rows == 0) return {crow, col, first, slots_a, slots_b};
  params.crow = crow.mutable_data_ptr<int64_t>();
  params.col = col.mutable_data_ptr<int64_t>();
  params.first = first.mutable_data_ptr<int64_t>();
  if (lists) {
    params.slots_a = slots_a.mutable_data_ptr<int32_t>();
    params.slots_b = slots_b.mutable_data_ptr<int32_t>();
  }
  const Tensor unsorted = at::empty({all.mirrored > 0 ? all.stored() : 0}, options.dtype(at::kInt));
  params.mirrors = unsorted.mutable_data_ptr<int32_t>();
  CsrKernels<Norm>::plan(PlanStep::kWrite, params, device.properties(), device.stream());
  return {crow, col, first, slots_a, slots_b};
}

BsrPlan bsr_plan(BsrPlanArguments& x) {
  check_plan(x);
  const OnDevice device(x.norm_a);
  TORCH_CHECK(!is_capturing(),
              "a block-sparse product waits for the size of its result: expected a plan, made "
              "before; got none while a CUDA graph is captured");
  const CsrTensors tensors(x, x.crow_input, x.col_input);
  const Threshold threshold(x.tau, x.norm_a.scalar_type());
  const Workspace workspace(tensors.rows(), x.norm_a.options());
  BsrPlan plan;
  tensors.checked(workspace.findings(), device.stream(),
                  [&]<class Norm>(const CsrMaps<Norm>& maps) {
                    kernels::PlanParams<Norm> params{};
                    params.maps = maps, params.added = tensors.added();
                    params.tau = threshold.argument<Norm>(), params.symmetric = x.symmetric;
                    params.findings = workspace.findings();
                    params.counts = workspace.counts(), params.before = workspace.before();
                    params.arrived = workspace.arrived();
                    params.mirrors_written = workspace.mirrors_written();
                    plan = plan_of(x, params, device);
                  });
  return plan;
}

Tensor bsr_find_tau(BsrFindTauArguments& x) {
  check_indices(x);
  check_search({.valid_ratio = x.valid_ratio, .max_error = x.max_error});
  const OnDevice device(x.norm_a);
  const CsrTensors tensors(x);
  const Tensor tau = at::empty({}, x.norm_a.options());
  const Workspace zeros(0, x.norm_a.options());
  const Tensor work = bytes_beside(x.norm_a, sparse_search_workspace());
  tensors.checked(zeros.findings(), device.stream(), [&]<class Norm>(const CsrMaps<Norm>& maps) {
    CsrKernels<Norm>::find_tau(maps, x.valid_ratio.has_value(),
                               x.valid_ratio ? *x.valid_ratio : *x.max_error, zeros.findings(),
                               work.mutable_data_ptr(), tau.mutable_data_ptr<Norm>(),
                               device.properties(), device.stream());
  });
  return tau;
}

std::tuple<Tensor, Tensor> bsr_error_bound(BsrErrorBoundArguments& x) {
  check_indices(x);
  check_tau(x.tau, x.norm_a.device());
  const OnDevice device(x.norm_a);
  const CsrTensors tensors(x);
  const Threshold threshold(x.tau, x.norm_a.scalar_type());
  const Tensor bound = at::empty({}, x.norm_a.options());
  const Tensor products = at::zeros({2}, x.norm_a.options().dtype(at::kLong));
  const Workspace zeros(0, x.norm_a.options());
  const Tensor work = bytes_beside(x.norm_a, sparse_search_workspace());
  tensors.checked(zeros.findings(), device.stream(), [&]<class Norm>(const CsrMaps<Norm>& maps) {
    CsrKernels<Norm>::error_bound(
        maps, threshold.argument<Norm>(), zeros.findings(), work.mutable_data_ptr(),
        &zeros.counts()->blocks,
        reinterpret_cast<unsigned long long*>(products.mutable_data_ptr<int64_t>()),
        bound.mutable_data_ptr<Norm>(), device.properties(), device.stream());
  });
  return {bound, products};
}

BsrDrop bsr_drop(BsrDropArguments& x) {
  check_drop(x);
  const OnDevice device(x.norms);
  TORCH_CHECK(!is_capturing(),
              "to drop blocks of a result the host waits for their number: expected no drop; got "
              "one while a CUDA graph is captured");
  const Tensor crow = x.crow.contiguous(), col = x.col.contiguous(), norms = x.norms.contiguous();
  const int64_t stored = norms.numel(), rows = crow.numel() - 1;
  const auto index = norms.options().dtype(at::kLong);
  const Tensor kept_crow = at::empty({rows + 1}, index), kept = at::empty({2, stored}, index);
  const Tensor kept_norms = at::empty_like(norms), bound = at::empty({}, norms.options());
  const Tensor values = x.values ? x.values->contiguous() : Tensor();
  const HostResult<kernels::DropTotals> totals;
  const auto run = [&]<class Norm>(Norm) {
    const auto room = static_cast<int64_t>(CsrKernels<Norm>::drop_workspace());
    const Tensor work = bytes_beside(norms, room + stored);
    kernels::DropParams<Norm> params{};
    params.pattern = pattern_of(crow, col);
    params.norms = norms.const_data_ptr<Norm>(), params.stored = stored;
    params.below = x.below, params.share = x.share.value_or(-1), params.symmetric = x.symmetric;
    Tensor a, b;
    if (x.share) {
      a = x.norm_a->contiguous(), b = x.norm_b->contiguous();
      params.norm_a = a.const_data_ptr<Norm>(), params.stored_a = a.numel();
      params.norm_b = b.const_data_ptr<Norm>(), params.stored_b = b.numel();
    }
    if (x.values) {
      params.values = values.const_data_ptr<Norm>();
      params.edge = static_cast<int>(values.size(1));
    }
    params.work = static_cast<kernels::DropWork<Norm>*>(work.mutable_data_ptr());
    params.stays = reinterpret_cast<bool*>(work.mutable_data_ptr<uint8_t>() + room);
    params.crow = kept_crow.mutable_data_ptr<int64_t>();
    params.col = kept.mutable_data_ptr<int64_t>(), params.numbers = params.col + stored;
    params.kept_norms = kept_norms.mutable_data_ptr<Norm>();
    params.bound = bound.mutable_data_ptr<Norm>();
    params.totals = totals.on_device();
    CsrKernels<Norm>::drop(params, device.multiprocessors(), device.stream());
  };
  norms.scalar_type() == at::kDouble ? run(double{}) : run(float{});
  const auto [stay, trace, norm] = totals.wait(device.stream());
  const Tensor sums = x.values ? at::tensor({trace, norm}, at::kDouble)
                               : at::empty({0}, at::TensorOptions().dtype(at::kDouble));
  return {kept_crow,
          kept[0].narrow(0, 0, stay),
          kept_norms.narrow(0, 0, stay),
          kept[1].narrow(0, 0, stay),
          bound,
          sums};
}

}  // namespace

TORCH_LIBRARY_IMPL(spamm_torch, CUDA, m) {
  m.impl("bsr_plan", boxed<&bsr_plan>());
  m.impl("bsr_find_tau", boxed<&bsr_find_tau>());
  m.impl("bsr_error_bound", boxed<&bsr_error_bound>());
  m.impl("bsr_drop", boxed<&bsr_drop>());
}

}  // namespace spamm::cuda
