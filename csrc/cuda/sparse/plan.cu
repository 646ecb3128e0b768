// bsr_plan on CUDA. The host waits once, for the sizes of the result and of the lists.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <torch/library.h>

#include <algorithm>

#include "cuda/sparse/blocks.h"
#include "cuda/sparse/maps.cuh"
#include "cuda/tau_argument.h"
#include "kernels/sparse/plan.cuh"

namespace spamm::cuda {
namespace {

using at::Tensor;
using kernels::CsrFindings;
using kernels::RowCounts;

// What the device's memory still takes, where so much is needed that it is worth the question.
std::optional<double> free_bytes(double needed, const OnDevice& device, at::Device of) {
  if (needed < device.properties().totalGlobalMem / 16) return std::nullopt;
  size_t free = 0, total = 0;
  C10_CUDA_CHECK(cudaMemGetInfo(&free, &total));
  const auto stats = c10::cuda::CUDACachingAllocator::getDeviceStats(of.index());
  return static_cast<double>(free) + stats.reserved_bytes[0].current -
         stats.allocated_bytes[0].current;
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

// The block columns that a kernel takes at a time, with `bytes` for each.
template <class Kernel>
int window_of(Kernel kernel, int64_t columns, int bytes, const OnDevice& device) {
  constexpr int kStatic = 4096;  // bytes that kernels declare, at most
  const auto most = static_cast<int>(device.properties().sharedMemPerBlockOptin - kStatic) / bytes;
  C10_CUDA_CHECK(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most * bytes));
  return static_cast<int>(std::clamp<int64_t>(columns, 1, most));
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
  const int64_t rows = params.maps.a.rows, columns = params.maps.b.columns;
  const auto blocks_of_rows = static_cast<unsigned>(std::max<int64_t>(rows, 1));
  const auto run = [&](auto kernel, int bytes) {
    params.window = window_of(kernel, columns, bytes, device);
    kernel<<<blocks_of_rows, kernels::kRowThreads, (params.window * bytes + 3) / 4 * 4,
             device.stream()>>>(params);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  };
  const HostResult<kernels::PlanTotals> totals;
  params.totals = totals.on_device();
  run(kernels::count_rows<Index, Norm>, kernels::kCountBytes);
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
  const int64_t mirrors = all.mirrored > 0 ? all.stored() : 0;
  const Tensor unsorted = at::empty({mirrors}, options.dtype(at::kInt));
  params.mirrors = unsorted.mutable_data_ptr<int32_t>();
  run(kernels::write_rows<Index, Norm>, kernels::kWriteBytes);
  if (mirrors > 0) {
    kernels::sort_mirrors<<<blocks_of_rows, kernels::kRowThreads, 0, device.stream()>>>(
        params.mirrors, params.mirrors_written, params.crow, params.col);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  }
  return {crow, col, first, slots_a, slots_b};
}

BsrPlan bsr_plan(BsrPlanArguments& x) {
  check_plan(x);
  const OnDevice device(x.norm_a);
  TORCH_CHECK(c10::cuda::currentStreamCaptureStatusMayInitCtx() == c10::cuda::CaptureStatus::None,
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
