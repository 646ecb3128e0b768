// Starts the threshold kernels: grids, workspaces, and one thread block for small maps.
#include <c10/cuda/CUDAException.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "cuda/threshold/launch.h"
#include "kernels/common/launch.cuh"
#include "kernels/threshold/error_bound.cuh"
#include "kernels/threshold/error_search.cuh"
#include "kernels/threshold/select_tau.cuh"

namespace spamm::cuda {

using kernels::NormMaps;

namespace {

constexpr int kThreads = kernels::kProductThreads;

template <class Norm>
unsigned grid_of(const NormMaps<Norm>& maps) {
  return static_cast<unsigned>(kernels::patches(maps));
}

}  // namespace

template <class Norm>
void ThresholdKernels<Norm>::valid_counts(const Maps& maps, const Tau& tau, int32_t* counts,
                                          cudaStream_t stream) {
  kernels::valid_counts<<<grid_of(maps), kThreads, 0, stream>>>(maps, tau, counts);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

template <class Norm>
size_t ThresholdKernels<Norm>::find_tau_workspace() {
  return std::max(sizeof(kernels::Selection<Norm, unsigned long long>),
                  sizeof(kernels::ErrorSearch<Norm>));
}

namespace {

template <class Count>
Count rank_of(double target) {
  return static_cast<Count>(std::max(1.0, std::floor(target + 0.5)));
}

// kGrid, Count: see select_tau().
template <bool kGrid, class Count, class Norm>
void launch_select(const NormMaps<Norm>& maps, double target, double products, void* workspace,
                   Norm* tau, unsigned blocks, const cudaDeviceProp& device, cudaStream_t stream) {
  constexpr int kWarps = kernels::kSelectWarps<Norm>;
  const auto kernel = kernels::select_tau<kGrid, Norm, Count>;
  // 1024 bytes suffice for the shared memory that the kernel declares statically.
  const int64_t room = static_cast<int64_t>(device.sharedMemPerBlockOptin) - 1024 -
                       kernels::kSelectSharedBytes<Norm>;
  constexpr int kKeptBytes = kernels::kStaircaseBytes<Norm>;  // one for each warp
  const int64_t staircases = kernels::staircases(maps);
  const int64_t turns = (staircases - 1) / (int64_t{blocks} * kWarps) + 1;
  const auto kept = static_cast<int>(std::min<int64_t>(turns, room / kKeptBytes));
  const int bytes = kernels::kSelectSharedBytes<Norm> + kept * kKeptBytes;
  // The same value for all maps, because other threads may launch the kernel at the same time.
  const auto most = static_cast<int>(room / kKeptBytes) * kKeptBytes;
  C10_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                      kernels::kSelectSharedBytes<Norm> + most));

  const auto rank = rank_of<Count>(target);
  const double share = std::min(1.0, static_cast<double>(rank) / products);
  C10_CUDA_CHECK(kernels::launch_with(
      kernels::meeting(kGrid), kernel, blocks, kernels::kSelectThreads<Norm>, bytes,
      /*overlap_previous=*/true, stream, maps,
      static_cast<kernels::Selection<Norm, Count>*>(workspace), rank, target,
      kernels::SampleRanks::of(share, kernels::kSelectThreads<Norm>), kept, tau));
}

}  // namespace

template <class Norm>
void ThresholdKernels<Norm>::find_tau(const Maps& maps, double valid_ratio, void* workspace,
                                      Norm* tau, const cudaDeviceProp& device,
                                      cudaStream_t stream) {
  // So few thread blocks synchronise faster than a full grid.
  constexpr int64_t kFewBlocks = 64;
  const int64_t staircases = kernels::staircases(maps);
  const int64_t multiprocessors = device.multiProcessorCount;
  // So many each thread block can count in 32 bits.
  TORCH_CHECK(staircases <= kernels::kMostStaircases * multiprocessors,
              "norm maps are too large for find_tau; got ", maps.batch, " x ", maps.mb, " x ",
              maps.kb, " x ", maps.nb);
  const auto products = static_cast<double>(maps.batch * maps.mb * maps.kb * maps.nb);
  const auto launch = [&](auto select, int64_t blocks) {
    select(maps, valid_ratio * products, products, workspace, tau, static_cast<unsigned>(blocks),
           device, stream);
  };
  const bool are_few = staircases <= kFewBlocks * kernels::kSelectWarps<Norm>;
  const int64_t blocks =  // that have work
      std::min({(staircases - 1) / kernels::kSelectRun + 1, multiprocessors,
                are_few ? kFewBlocks : multiprocessors});
  if (staircases <= kernels::kSelectWarps<Norm>) {
    launch(launch_select<false, unsigned, Norm>, 1);
  } else if (products <= std::numeric_limits<uint32_t>::max()) {
    launch(launch_select<true, unsigned, Norm>, blocks);
  } else {
    launch(launch_select<true, unsigned long long, Norm>, blocks);
  }
}

template <class Norm>
size_t ThresholdKernels<Norm>::error_bound_workspace(const Maps& maps) {
  return kErrorStateBytes + grid_of(maps) * sizeof(kernels::SumOfSquares<Norm>);
}

template <class Norm>
void ThresholdKernels<Norm>::error_bound(const Maps& maps, const Tau& tau, void* workspace,
                                         Norm* bound, cudaStream_t stream) {
  auto* const partial = reinterpret_cast<kernels::SumOfSquares<Norm>*>(
      static_cast<char*>(workspace) + kErrorStateBytes);
  kernels::error_bound<<<grid_of(maps), kThreads, 0, stream>>>(
      maps, tau, partial, static_cast<unsigned*>(workspace), bound);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

namespace {

// kGrid: see find_tau_for_error().
template <bool kGrid, class Norm>
void launch_error_search(const NormMaps<Norm>& maps, double max_error, void* workspace, Norm* tau,
                         unsigned blocks, int threads, int parts, int64_t most_bytes,
                         cudaStream_t stream) {
  const auto kernel = kernels::find_tau_for_error<kGrid, Norm>;
  C10_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                      static_cast<int>(most_bytes)));
  C10_CUDA_CHECK(kernels::launch_with(kernels::meeting(kGrid), kernel, blocks, threads,
                                      kernels::error_search_bytes<Norm>(threads),
                                      /*overlap_previous=*/true, stream, maps, max_error, parts,
                                      static_cast<kernels::ErrorSearch<Norm>*>(workspace), tau));
}

}  // namespace

template <class Norm>
void ThresholdKernels<Norm>::find_tau_for_error(const Maps& maps, double max_error, void* workspace,
                                                Norm* tau, const cudaDeviceProp& device,
                                                cudaStream_t stream) {
  constexpr int64_t kWarp = 32, kLeastDepth = 8;  // of k for each thread
  // 1024 bytes suffice for the shared memory that the kernel declares statically.
  const auto room = static_cast<int64_t>(device.sharedMemPerBlockOptin) - 1024;
  int64_t most_threads = kernels::kMostSearchThreads;
  while (kernels::error_search_bytes<Norm>(most_threads) > room) most_threads -= 32;
  const int64_t most_bytes = kernels::error_search_bytes<Norm>(most_threads);
  const int64_t most_blocks =
      std::min<int64_t>(device.multiProcessorCount, kernels::kMostSearchBlocks);
  // A thread for each block of C, in one thread block if that suffices. Where a thread block has
  // room for more, several threads share a block of C with a long K.
  const int64_t places = maps.batch * maps.mb * maps.nb;
  const int64_t for_each = places <= most_threads ? places : (places - 1) / most_blocks + 1;
  const int64_t lanes = std::min((for_each + kWarp - 1) / kWarp * kWarp, most_threads);
  const int64_t parts = std::clamp<int64_t>(maps.kb / kLeastDepth, 1, most_threads / lanes);
  const int64_t blocks = std::min((places - 1) / lanes + 1, most_blocks);
  const auto launch = [&](auto search) {
    search(maps, max_error, workspace, tau, static_cast<unsigned>(blocks),
           static_cast<int>(lanes * parts), static_cast<int>(parts), most_bytes, stream);
  };
  if (blocks == 1) {
    launch(launch_error_search<false, Norm>);
  } else {
    launch(launch_error_search<true, Norm>);
  }
}

template struct ThresholdKernels<float>;
template struct ThresholdKernels<double>;

}  // namespace spamm::cuda
