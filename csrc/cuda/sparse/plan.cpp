// bsr_plan on CUDA. The host waits once, for the sizes of the result and of the lists.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <torch/library.h>

#include "cuda/sparse/maps.h"
#include "cuda/tau_argument.h"

namespace spamm::cuda {
namespace {

using at::Tensor;
using kernels::CsrFindings;
using kernels::RowCounts;

// What the device's memory still takes, where so much is needed that it is worth the question.
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

// What the kernels count and find, in one tensor of zeros.
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

template <class Index, class Norm>
BsrPlan plan_of(const BsrPlanArguments& x, kernels::PlanParams<Index, Norm> params,
                const OnDevice& device) {
  const int64_t rows = params.maps.a.rows;
  const HostResult<kernels::PlanTotals> totals;
  params.totals = totals.on_device();
  CsrKernels<Index, Norm>::plan(PlanStep::kCount, params, device.properties(), device.stream());
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
  CsrKernels<Index, Norm>::plan(PlanStep::kWrite, params, device.properties(), device.stream());
  return {crow, col, first, slots_a, slots_b};
}

BsrPlan bsr_plan(BsrPlanArguments& x) {
  check_plan(x);
  const OnDevice device(x.norm_a);
  TORCH_CHECK(!is_capturing(),
              "a block-sparse product waits for the size of its result: expected a plan, made "
              "before; got none while a CUDA graph is captured");
  const CsrTensors tensors(x, x.crow_input, x.col_input);
  const Tensor threshold = tau_as(x.tau, x.norm_a.scalar_type());
  const Workspace workspace(tensors.rows(), x.norm_a.options());
  BsrPlan plan;
  tensors.checked(workspace.findings(), device.stream(),
                  [&]<class Index, class Norm>(const kernels::CsrMaps<Index, Norm>& maps) {
                    kernels::PlanParams<Index, Norm> params{};
                    params.maps = maps, params.added = tensors.added<Index>();
                    params.tau = tau_argument<Norm>(threshold), params.symmetric = x.symmetric;
                    params.findings = workspace.findings();
                    params.counts = workspace.counts(), params.before = workspace.before();
                    params.arrived = workspace.arrived();
                    params.mirrors_written = workspace.mirrors_written();
                    plan = plan_of(x, params, device);
                  });
  return plan;
}

}  // namespace

TORCH_LIBRARY_IMPL(spamm_torch, CUDA, m) { m.impl("bsr_plan", boxed<&bsr_plan>()); }

}  // namespace spamm::cuda
