// Starts the threshold kernels: grids, workspaces, and one thread block for small maps.
#include <c10/cuda/CUDAException.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "cuda/threshold/launch.h"
#include "cuda/threshold/staircase_grid.cuh"
#include "kernels/common/launch.cuh"
#include "kernels/threshold/error_bound.cuh"
#include "kernels/threshold/select_tau.cuh"
#include "kernels/threshold/valid_counts.cuh"

namespace spamm::cuda {

using kernels::NormMaps;
using kernels::Tau;

namespace {

constexpr int kThreads = kernels::kProductThreads;

template <class Norm>
unsigned grid_of(const NormMaps<Norm>& maps) {
  return static_cast<unsigned>(kernels::patches(maps));
}

// Pointers into the workspace of the error kernels.
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
  return sizeof(kernels::Selection<Norm, unsigned long long>);
}

namespace {

// If `share` of all products come before a product in order: its expected rank in a sample, plus
// and minus two standard deviations. A wider interval would cost time in every search. A miss costs
// one more round.
template <class Norm>
kernels::SampleRanks sample_ranks(double share) {
  const double place = kernels::kSelectThreads<Norm> * share;
  const double slack = 2 * std::sqrt(place * (1 - share)) + 1;
  return {static_cast<int>(std::floor(place - slack)), static_cast<int>(std::ceil(place + slack))};
}

// kGrid, kLaneRows, Count: see select_tau().
template <bool kGrid, int kLaneRows, class Count, class Norm>
void launch_select(const NormMaps<Norm>& maps, double target, double products, void* workspace,
                   Norm* tau, unsigned blocks, const cudaDeviceProp& device, cudaStream_t stream) {
  constexpr int kWarps = kernels::kSelectWarps<Norm>;
  const auto kernel = kernels::select_tau<kGrid, kLaneRows, Norm, Count>;
  // 1024 bytes suffice for the shared memory that the kernel declares statically.
  const int64_t room = static_cast<int64_t>(device.sharedMemPerBlockOptin) - 1024 -
                       kernels::kSelectSharedBytes<Norm>;
  constexpr int kKeptBytes = kernels::kStaircaseBytes<Norm, kLaneRows>;  // one for each warp
  const int64_t staircases = kernels::staircases<kLaneRows>(maps);
  const int64_t turns = (staircases - 1) / (int64_t{blocks} * kWarps) + 1;
  const auto kept = static_cast<int>(std::min<int64_t>(turns, room / kKeptBytes));
  const int bytes = kernels::kSelectSharedBytes<Norm> + kept * kKeptBytes;
  // The same value for all maps, because other threads may launch the kernel at the same time.
  const auto most = static_cast<int>(room / kKeptBytes) * kKeptBytes;
  C10_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                      kernels::kSelectSharedBytes<Norm> + most));

  bool overlaps = false;
  C10_CUDA_CHECK(kernels::find_waits(reinterpret_cast<const void*>(kernel), overlaps));
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeCooperative;
  attributes[0].val.cooperative = kGrid;
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t launch{};
  launch.gridDim = blocks;
  launch.blockDim = kernels::kSelectThreads<Norm>;
  launch.dynamicSmemBytes = bytes;
  launch.stream = stream;
  launch.attrs = attributes;
  launch.numAttrs = overlaps ? 2 : 1;
  const auto rank = static_cast<Count>(std::max(1.0, std::floor(target + 0.5)));
  const double share = std::min(1.0, static_cast<double>(rank) / products);
  C10_CUDA_CHECK(cudaLaunchKernelEx(&launch, kernel, maps,
                                    static_cast<kernels::Selection<Norm, Count>*>(workspace), rank,
                                    target, sample_ranks<Norm>(share), kept, tau));
}

}  // namespace

template <class Norm>
void launch_find_tau(const NormMaps<Norm>& maps, double valid_ratio, void* workspace, Norm* tau,
                     const cudaDeviceProp& device, cudaStream_t stream) {
  // So few thread blocks synchronise faster than a full grid.
  constexpr int64_t kFewBlocks = 64;
  const int64_t small = kernels::staircases<1>(maps), large = kernels::staircases<2>(maps);
  const int64_t multiprocessors = device.multiProcessorCount;
  check_staircases<2>(maps, multiprocessors, "find_tau");
  const auto products = static_cast<double>(maps.batch * maps.mb * maps.kb * maps.nb);
  const auto launch = [&](auto select, int64_t blocks) {
    select(maps, valid_ratio * products, products, workspace, tau, static_cast<unsigned>(blocks),
           device, stream);
  };
  if (small <= kernels::kSelectWarps<Norm>) {
    launch(launch_select<false, 1, unsigned, Norm>, 1);
  } else if (small <= kFewBlocks * kernels::kSelectWarps<Norm>) {
    launch(launch_select<true, 1, unsigned, Norm>,
           blocks_for(small, std::min(kFewBlocks, multiprocessors)));
  } else if (products <= std::numeric_limits<uint32_t>::max()) {
    launch(launch_select<true, 2, unsigned, Norm>, blocks_for(large, multiprocessors));
  } else {
    launch(launch_select<true, 2, unsigned long long, Norm>, blocks_for(large, multiprocessors));
  }
}

template <class Norm>
size_t error_workspace(const NormMaps<Norm>& maps) {
  // A sweep needs one sum for each thread block and threshold. The start of the search needs two
  // for each warp.
  constexpr int kSums = std::max(kernels::SearchStep<Norm>::kThresholds, 2 * kThreads / 32);
  return kErrorStateBytes + grid_of(maps) * kSums * sizeof(kernels::SumOfSquares<Norm>);
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

#define SPAMM_INSTANTIATE(Norm)                                                           \
  template void launch_valid_counts(const NormMaps<Norm>&, const Tau<Norm>&, int32_t*,    \
                                    cudaStream_t);                                        \
  template size_t find_tau_workspace<Norm>();                                             \
  template void launch_find_tau(const NormMaps<Norm>&, double, void*, Norm*,              \
                                const cudaDeviceProp&, cudaStream_t);                     \
  template size_t error_workspace(const NormMaps<Norm>&);                                 \
  template void launch_error_bound(const NormMaps<Norm>&, const Tau<Norm>&, void*, Norm*, \
                                   cudaStream_t);                                         \
  template void launch_find_tau_for_error(const NormMaps<Norm>&, double, void*, Norm*, cudaStream_t)

SPAMM_INSTANTIATE(float);
SPAMM_INSTANTIATE(double);

}  // namespace spamm::cuda
