#include "threshold_launch.h"

#include <c10/cuda/CUDAException.h>

#include <algorithm>
#include <cmath>

#include "kernels/error_bound.cuh"
#include "kernels/select_tau.cuh"
#include "kernels/valid_counts.cuh"

namespace spamm::cuda {

using kernels::NormMaps;
using kernels::Tau;

namespace {

constexpr int kThreads = kernels::kProductThreads;

template <class Norm>
unsigned grid_of(const NormMaps<Norm>& maps) {
  return static_cast<unsigned>(kernels::patches(maps));
}

// Where the parts of the error kernels' workspace lie.
template <class Norm>
struct ErrorWorkspace {
  kernels::ErrorSearch<Norm>* search;
  kernels::SumOfSquares<Norm>* partial;

  explicit ErrorWorkspace(void* workspace)
      : search(static_cast<kernels::ErrorSearch<Norm>*>(workspace)),
        partial(reinterpret_cast<kernels::SumOfSquares<Norm>*>(static_cast<char*>(workspace) +
                                                               kErrorStateBytes)) {
    static_assert(sizeof(kernels::ErrorSearch<Norm>) <= kErrorStateBytes);
  }
};

}  // namespace

template <class Norm>
void launch_valid_counts(const NormMaps<Norm>& maps, const Tau<Norm>& tau, int32_t* counts,
                         cudaStream_t stream) {
  kernels::valid_counts<<<grid_of(maps), kThreads, 0, stream>>>(maps, tau, counts);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

template <class Norm>
size_t find_tau_workspace() {
  return sizeof(kernels::Selection<Norm>);
}

template <class Norm>
void launch_find_tau(const NormMaps<Norm>& maps, double valid_ratio, void* workspace, Norm* tau,
                     int multiprocessors, cudaStream_t stream) {
  auto* const selection = static_cast<kernels::Selection<Norm>*>(workspace);
  const double target = valid_ratio * static_cast<double>(maps.batch * maps.mb * maps.kb * maps.nb);
  const auto rank = static_cast<unsigned long long>(std::ceil(target));
  const auto tiles = [](int64_t size, int64_t tile) { return (size - 1) / tile + 1; };
  const int64_t work = maps.batch * tiles(maps.mb, kernels::kSelectRows) * tiles(maps.nb, kernels::kPatchColumns) *
                       tiles(maps.kb, kernels::kSelectDepth);
  constexpr int kBlocksPerSm = 4;
  const auto blocks = static_cast<unsigned>(
      std::min(work, static_cast<int64_t>(multiprocessors) * kBlocksPerSm));
  for (int unsettled = kernels::Bits<Norm>::kCount; unsettled > 0;) {
    const int bits = std::min(unsettled, kernels::kDigitBits);
    unsettled -= bits;
    kernels::select_digit<<<blocks, kThreads, 0, stream>>>(maps, selection, unsettled, bits, rank,
                                                           target, tau);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  }
  kernels::select_successor<<<blocks, kThreads, 0, stream>>>(maps, selection, tau);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

template <class Norm>
size_t error_workspace(const NormMaps<Norm>& maps) {
  return kErrorStateBytes + grid_of(maps) * kernels::SearchStep<Norm>::kThresholds *
                                sizeof(kernels::SumOfSquares<Norm>);
}

template <class Norm>
void launch_error_bound(const NormMaps<Norm>& maps, const Tau<Norm>& tau, void* workspace,
                        Norm* bound, cudaStream_t stream) {
  const ErrorWorkspace<Norm> space(workspace);
  const kernels::BoundOfTau<Norm> sweep{tau, bound};
  kernels::bound_errors<<<grid_of(maps), kThreads, 0, stream>>>(maps, sweep, space.partial,
                                                                &space.search->arrived);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

template <class Norm>
void launch_find_tau_for_error(const NormMaps<Norm>& maps, double max_error, void* workspace,
                               Norm* tau, cudaStream_t stream) {
  const ErrorWorkspace<Norm> space(workspace);
  const unsigned blocks = grid_of(maps);
  kernels::start_error_search<<<std::min(blocks, 256u), kThreads, 0, stream>>>(
      maps, max_error, space.search, space.partial, tau);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  for (int unsettled = kernels::Bits<Norm>::kCount; unsettled > 0;) {
    unsettled = std::max(unsettled - 3, 0);
    const kernels::SearchStep<Norm> sweep{space.search, unsettled, tau};
    kernels::bound_errors<<<blocks, kThreads, 0, stream>>>(maps, sweep, space.partial,
                                                           &space.search->arrived);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  }
}

#define SPAMM_INSTANTIATE(Norm)                                                                  \
  template void launch_valid_counts(const NormMaps<Norm>&, const Tau<Norm>&, int32_t*,           \
                                    cudaStream_t);                                               \
  template size_t find_tau_workspace<Norm>();                                                    \
  template void launch_find_tau(const NormMaps<Norm>&, double, void*, Norm*, int, cudaStream_t); \
  template size_t error_workspace(const NormMaps<Norm>&);                                        \
  template void launch_error_bound(const NormMaps<Norm>&, const Tau<Norm>&, void*, Norm*,        \
                                   cudaStream_t);                                                \
  template void launch_find_tau_for_error(const NormMaps<Norm>&, double, void*, Norm*, cudaStream_t)

SPAMM_INSTANTIATE(float);
SPAMM_INSTANTIATE(double);

}  // namespace spamm::cuda
