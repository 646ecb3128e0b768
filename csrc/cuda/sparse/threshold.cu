// bsr_find_tau and bsr_error_bound on CUDA. Nothing waits.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>

#include "cuda/sparse/maps.cuh"
#include "cuda/tau_argument.h"
#include "kernels/common/launch.cuh"
#include "kernels/sparse/listed_products.cuh"
#include "kernels/sparse/losses.cuh"

namespace spamm::cuda {
namespace {

using at::Tensor;
using kernels::CsrFindings;
using kernels::CsrMaps;
using kernels::SweepRoom;

constexpr int64_t kWord = sizeof(int64_t);

constexpr int64_t kStatic = 2048;  // bytes of shared memory that kernels declare, at most

int64_t most_shared(const OnDevice& device) {
  return static_cast<int64_t>(device.properties().sharedMemPerBlockOptin) - kStatic;
}

// Room for all block columns, if they take no more than a third of what a thread block has where
// kSweepsTogether share a multiprocessor, and for the bins of as many as fit.
template <class Norm>
SweepRoom sweep_room(int64_t columns, const OnDevice& device) {
  constexpr int64_t kReserved = 1024;  // what the system takes of each
  const auto all = static_cast<int64_t>(device.properties().sharedMemPerMultiprocessor);
  const int64_t bytes = all / kernels::kSweepsTogether - kReserved - kStatic;
  SweepRoom room{static_cast<int>(std::clamp<int64_t>(columns, 1, bytes / 3 / 2)), 0};
  const int64_t bins = kernels::kLossBins * sizeof(kernels::Units);
  const int64_t fit = (bytes - room.bytes<Norm>()) / bins;
  room.columns = static_cast<int>(std::min<int64_t>(room.window, fit));
  return room;
}

// A workspace of zeros, `words` of them in front of the findings, and of the search behind them.
class Workspace {
 public:
  Workspace(int64_t words, int64_t bytes, const at::TensorOptions& options)
      : zeros_(at::zeros({words + static_cast<int64_t>(sizeof(CsrFindings)) / kWord},
                         options.dtype(at::kLong))),
        rest_(at::empty({bytes}, options.dtype(at::kByte))) {}

  unsigned long long* words() const {
    return reinterpret_cast<unsigned long long*>(zeros_.mutable_data_ptr<int64_t>());
  }
  CsrFindings* findings() const {
    return reinterpret_cast<CsrFindings*>(words() + zeros_.numel()) - 1;
  }
  void* rest() const { return rest_.mutable_data_ptr(); }

 private:
  Tensor zeros_, rest_;
};

// Launches a cooperative kernel with work for so many thread blocks, of which a multiprocessor runs
// `together`.
template <class... Params>
void launch(void (*kernel)(Params...), int64_t blocks, int together, int threads, int64_t bytes,
            const OnDevice& device, const std::type_identity_t<Params>&... params) {
  // The same value for all maps, because other threads may launch the kernel at the same time.
  C10_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                      static_cast<int>(most_shared(device))));
  const int64_t most =
      std::min<int64_t>(together * device.multiprocessors(), kernels::kMostSearchBlocks);
  cudaLaunchAttribute cooperative{};
  cooperative.id = cudaLaunchAttributeCooperative;
  cooperative.val.cooperative = 1;
  C10_CUDA_CHECK(kernels::launch_with(
      &cooperative, kernel, static_cast<unsigned>(std::clamp<int64_t>(blocks, 1, most)), threads,
      bytes, /*overlap_previous=*/false, device.stream(), params...));
}

Tensor bsr_find_tau(BsrFindTauArguments& x) {
  check_indices(x);
  check_search({.valid_ratio = x.valid_ratio, .max_error = x.max_error});
  const OnDevice device(x.norm_a);
  const CsrTensors tensors(x);
  const Tensor tau = at::empty({}, x.norm_a.options());
  const auto run = [&]<class Index, class Norm>(const CsrMaps<Index, Norm>& maps,
                                                const Workspace& workspace) {
    Norm* const out = tau.mutable_data_ptr<Norm>();
    if (x.valid_ratio) {
      launch(kernels::select_sparse_tau<Index, Norm>, maps.a.stored / 64, 1,
             kernels::kSelectThreads<Norm>, kernels::kSelectSharedBytes<Norm>, device, maps,
             *x.valid_ratio, workspace.findings(),
             static_cast<kernels::Selection<Norm, unsigned long long>*>(workspace.rest()), out);
    } else {
      const auto room = sweep_room<Norm>(tensors.columns, device);
      launch(kernels::find_sparse_tau_for_error<Index, Norm>, maps.a.rows, kernels::kSweepsTogether,
             kernels::kSweepThreads, room.template bytes<Norm>(), device, maps, *x.max_error, room,
             workspace.findings(), static_cast<kernels::ErrorSearch<Norm>*>(workspace.rest()), out);
    }
  };
  constexpr int64_t kBytes = std::max(sizeof(kernels::Selection<double, unsigned long long>),
                                      sizeof(kernels::ErrorSearch<double>));
  const Workspace workspace(
      0, std::max<int64_t>(kBytes, sizeof(kernels::Selection<float, unsigned long long>)),
      x.norm_a.options());
  tensors.checked(workspace.findings(), device.stream(),
                  [&](const auto& maps) { run(maps, workspace); });
  return tau;
}

std::tuple<Tensor, Tensor> bsr_error_bound(BsrErrorBoundArguments& x) {
  check_indices(x);
  check_tau(x.tau, x.norm_a.device());
  const OnDevice device(x.norm_a);
  const CsrTensors tensors(x);
  const Tensor threshold = tau_as(x.tau, x.norm_a.scalar_type());
  const Tensor bound = at::empty({}, x.norm_a.options());
  const Tensor products = at::zeros({2}, x.norm_a.options().dtype(at::kLong));
  const Workspace workspace(1, sizeof(kernels::ErrorSearch<double>), x.norm_a.options());
  tensors.checked(
      workspace.findings(), device.stream(),
      [&]<class Index, class Norm>(const CsrMaps<Index, Norm>& maps) {
        const auto room = sweep_room<Norm>(tensors.columns, device);
        launch(kernels::sparse_error_bound<Index, Norm>, maps.a.rows, kernels::kSweepsTogether,
               kernels::kSweepThreads, room.template bytes<Norm>(), device, maps,
               tau_argument<Norm>(threshold), room, workspace.findings(),
               static_cast<kernels::ErrorSearch<Norm>*>(workspace.rest()), workspace.words(),
               reinterpret_cast<unsigned long long*>(products.mutable_data_ptr<int64_t>()),
               bound.mutable_data_ptr<Norm>());
      });
  return {bound, products};
}

}  // namespace

TORCH_LIBRARY_IMPL(spamm_torch, CUDA, m) {
  m.impl("bsr_find_tau", boxed<&bsr_find_tau>());
  m.impl("bsr_error_bound", boxed<&bsr_error_bound>());
}

}  // namespace spamm::cuda
