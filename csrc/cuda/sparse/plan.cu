// bsr_plan on CUDA. The host waits once, for the sizes of the result and of the lists.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <torch/library.h>

#include <algorithm>

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

// The rows' counts, the sums of those before each row, and findings, in one tensor, so that one
// copy brings what the host waits for.
class Workspace {
 public:
  Workspace(int64_t rows, const at::TensorOptions& options)
      : rows_(rows),
        numbers_(at::zeros({2 * kEach * (rows + 1) + kFindings}, options.dtype(at::kLong))) {}

  RowCounts* counts() const { return at<RowCounts>(0); }
  RowCounts* before() const { return at<RowCounts>(kEach * (rows_ + 1)); }
  CsrFindings* findings() const { return at<CsrFindings>(2 * kEach * (rows_ + 1)); }

  struct Totals {
    RowCounts all;
    CsrFindings findings;
  };
  Totals wait(cudaStream_t stream) const {
    // A copy to memory that is not pinned takes the host twice as long.
    const Tensor found =
        at::empty({kEach + kFindings}, at::TensorOptions().dtype(at::kLong).pinned_memory(true));
    const auto* const totals = static_cast<const Totals*>(found.mutable_data_ptr());
    C10_CUDA_CHECK(cudaMemcpyAsync(found.mutable_data_ptr(), before() + rows_, sizeof(Totals),
                                   cudaMemcpyDeviceToHost, stream));
    C10_CUDA_CHECK(cudaStreamSynchronize(stream));
    return *totals;
  }

 private:
  static constexpr int64_t kEach = sizeof(RowCounts) / sizeof(int64_t);
  static constexpr int64_t kFindings = sizeof(CsrFindings) / sizeof(int64_t);

  template <class T>
  T* at(int64_t place) const {
    return reinterpret_cast<T*>(numbers_.mutable_data_ptr<int64_t>() + place);
  }

  int64_t rows_;
  Tensor numbers_;
};

template <class Index, class Norm>
BsrPlan plan_of(const BsrPlanArguments& x, kernels::PlanParams<Index, Norm> params,
                const Workspace& workspace, const OnDevice& device) {
  const int64_t rows = params.maps.a.rows, columns = params.maps.b.columns;
  const auto blocks_of_rows = static_cast<unsigned>(rows);
  const auto run = [&](auto kernel, int bytes) {
    params.window = window_of(kernel, columns, bytes, device);
    kernel<<<blocks_of_rows, kernels::kRowThreads, (params.window * bytes + 3) / 4 * 4,
             device.stream()>>>(params);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  };
  if (rows > 0) run(kernels::count_rows<Index, Norm>, kernels::kCountBytes);
  kernels::sum_rows<<<1, kernels::kSumThreads, 0, device.stream()>>>(workspace.counts(), rows,
                                                                     workspace.before());
  C10_CUDA_KERNEL_LAUNCH_CHECK();

  const auto [all, findings] = workspace.wait(device.stream());
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
  const Tensor written = at::zeros({x.symmetric ? rows : 0}, options.dtype(at::kInt));
  params.mirrors = unsorted.mutable_data_ptr<int32_t>();
  params.mirrors_written = reinterpret_cast<unsigned*>(written.mutable_data_ptr<int32_t>());
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
                    plan = plan_of(x, params, workspace, device);
                  });
  return plan;
}

}  // namespace

TORCH_LIBRARY_IMPL(spamm_torch, CUDA, m) {
  m.impl("bsr_plan", torch::CppFunction::makeFromBoxedFunction<&run_bsr<&bsr_plan>>());
}

}  // namespace spamm::cuda
