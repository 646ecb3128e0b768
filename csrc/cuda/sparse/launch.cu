// Starts the kernels of block-sparse matrices: grids, workspaces and shared memory.
#include <c10/cuda/CUDAException.h>

#include <algorithm>

#include "cuda/norm_map/norm_map.h"
#include "cuda/sparse/launch.h"
#include "kernels/common/launch.cuh"
#include "kernels/sparse/blocks.cuh"
#include "kernels/sparse/drop.cuh"
#include "kernels/sparse/losses.cuh"
#include "kernels/sparse/plan.cuh"

namespace spamm::cuda {

using c10::ScalarType;
using kernels::CsrFindings;
using kernels::PlanParams, kernels::DropParams, kernels::SweepRoom, kernels::Tau;

namespace {

using Count = unsigned long long;

template <class... Params>
void launch(void (*kernel)(Params...), dim3 grid, int threads, cudaStream_t stream,
            const std::type_identity_t<Params>&... params) {
  C10_CUDA_CHECK(
      kernels::launch(kernel, grid, threads, 0, /*overlap_previous=*/false, stream, params...));
}

unsigned blocks_of_rows(int64_t rows) { return static_cast<unsigned>(std::max<int64_t>(rows, 1)); }

constexpr int64_t kStatic = 2048;  // bytes of shared memory that searches declare, at most

// Room for all block columns, if they take no more than a third of what a thread block has where
// kSweepsTogether share a multiprocessor, and for the bins of as many as fit.
template <class Norm>
SweepRoom sweep_room(int64_t columns, const cudaDeviceProp& device) {
  constexpr int64_t kReserved = 1024;  // what the system takes of each
  const auto all = static_cast<int64_t>(device.sharedMemPerMultiprocessor);
  const int64_t bytes = all / kernels::kSweepsTogether - kReserved - kStatic;
  SweepRoom room{static_cast<int>(std::clamp<int64_t>(columns, 1, bytes / 3 / 2)), 0};
  const int64_t bins = kernels::kLossBins * sizeof(kernels::Units);
  const int64_t fit = (bytes - room.bytes<Norm>()) / bins;
  room.columns = static_cast<int>(std::min<int64_t>(room.window, fit));
  return room;
}

// Launches a cooperative kernel with work for so many thread blocks, `together` a multiprocessor.
template <class... Params>
void launch_search(void (*kernel)(Params...), int64_t blocks, int together, int threads,
                   int64_t bytes, const cudaDeviceProp& device, cudaStream_t stream,
                   const std::type_identity_t<Params>&... params) {
  // The same value for all maps, because other threads may launch the kernel at the same time.
  const auto most_bytes = static_cast<int64_t>(device.sharedMemPerBlockOptin) - kStatic;
  C10_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                      static_cast<int>(most_bytes)));
  const int64_t most =
      std::min<int64_t>(together * device.multiProcessorCount, kernels::kMostSearchBlocks);
  C10_CUDA_CHECK(kernels::launch_with(
      kernels::meeting(), kernel, static_cast<unsigned>(std::clamp<int64_t>(blocks, 1, most)),
      threads, bytes, /*overlap_previous=*/false, stream, params...));
}

constexpr int kTogether = 16;  // blocks of a row that are copied at a time

}  // namespace

void launch_check_patterns(const kernels::GivenPattern (&patterns)[3], CsrFindings* findings,
                           cudaStream_t stream) {
  int64_t warps = 0;
  for (const auto& pattern : patterns) warps += blocks_of_rows(pattern.rows);
  launch(kernels::check_patterns, static_cast<unsigned>((warps - 1) / kernels::kCheckWarps + 1),
         kernels::kCheckThreads, stream, patterns[0], patterns[1], patterns[2], findings);
}

// A kernel takes as many block columns at a time as shared memory holds with `bytes` for each.
template <class Norm>
void CsrKernels<Norm>::plan(PlanStep step, PlanParams<Norm> params, const cudaDeviceProp& device,
                            cudaStream_t stream) {
  constexpr int kStaticBytes = 4096;  // that kernels declare, at most
  const bool counts = step == PlanStep::kCount;
  const auto kernel = counts ? kernels::count_rows<Norm> : kernels::write_rows<Norm>;
  const int bytes = counts ? kernels::kCountBytes : kernels::kWriteBytes;
  const auto most = static_cast<int>(device.sharedMemPerBlockOptin - kStaticBytes) / bytes;
  C10_CUDA_CHECK(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most * bytes));
  params.window = static_cast<int>(std::clamp<int64_t>(params.maps.b.columns, 1, most));
  kernel<<<blocks_of_rows(params.maps.a.rows), kernels::kRowThreads,
           (params.window * bytes + 3) / 4 * 4, stream>>>(params);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  if (counts || params.mirrors == nullptr) return;
  launch(kernels::sort_mirrors, blocks_of_rows(params.maps.a.rows), kernels::kRowThreads, stream,
         params.mirrors, params.mirrors_written, params.crow, params.col);
}

template <class Norm>
size_t CsrKernels<Norm>::drop_workspace() {
  return sizeof(kernels::DropWork<Norm>);
}

template <class Norm>
void CsrKernels<Norm>::drop(const DropParams<Norm>& params, int multiprocessors,
                            cudaStream_t stream) {
  // Enough for a few rows in each warp and a few norms in each thread.
  const int64_t blocks = std::max<int64_t>(params.pattern.rows / kernels::kDropWarps,
                                           params.stored / (2 * kernels::kDropThreads));
  const int64_t most = std::min<int64_t>(multiprocessors, kernels::kMostSearchBlocks);
  C10_CUDA_CHECK(kernels::launch_with(
      kernels::meeting(), kernels::drop_blocks<Norm>, std::clamp<int64_t>(blocks, 1, most),
      kernels::kDropThreads, /*shared_bytes=*/0, /*overlap_previous=*/true, stream, params));
}

size_t sparse_search_workspace() {
  return std::max({sizeof(kernels::Selection<double, Count>),
                   sizeof(kernels::Selection<float, Count>), sizeof(kernels::ErrorSearch<double>)});
}

template <class Norm>
void CsrKernels<Norm>::find_tau(const Maps& maps, bool of_ratio, double limit,
                                const CsrFindings* findings, void* workspace, Norm* tau,
                                const cudaDeviceProp& device, cudaStream_t stream) {
  if (of_ratio) {
    launch_search(kernels::select_sparse_tau<Norm>, maps.a.stored / 64, 1,
                  kernels::kSelectThreads<Norm>, kernels::kSelectSharedBytes<Norm>, device, stream,
                  maps, limit, findings, static_cast<kernels::Selection<Norm, Count>*>(workspace),
                  tau);
  } else {
    const auto room = sweep_room<Norm>(maps.b.columns, device);
    launch_search(kernels::find_sparse_tau_for_error<Norm>, maps.a.rows, kernels::kSweepsTogether,
                  kernels::kSweepThreads, room.template bytes<Norm>(), device, stream, maps, limit,
                  room, findings, static_cast<kernels::ErrorSearch<Norm>*>(workspace), tau);
  }
}

template <class Norm>
void CsrKernels<Norm>::error_bound(const Maps& maps, const Tau<Norm>& tau,
                                   const CsrFindings* findings, void* workspace, Count* largest,
                                   Count* products, Norm* bound, const cudaDeviceProp& device,
                                   cudaStream_t stream) {
  const auto room = sweep_room<Norm>(maps.b.columns, device);
  launch_search(kernels::sparse_error_bound<Norm>, maps.a.rows, kernels::kSweepsTogether,
                kernels::kSweepThreads, room.template bytes<Norm>(), device, stream, maps, tau,
                room, findings, static_cast<kernels::ErrorSearch<Norm>*>(workspace), largest,
                products, bound);
}

void launch_find_tiles(const kernels::ProductLists& lists, const kernels::TileConfig& tile,
                       int granule, cudaStream_t stream) {
  launch(kernels::find_tiles, lists.c.rows, kernels::kFindTilesThreads, stream, lists,
         tile.rows / granule, tile.columns / granule);
}

void launch_find_cells(const kernels::Pattern& pattern, int* cells, cudaStream_t stream) {
  launch(kernels::find_cells, pattern.rows, kernels::kBlockThreads, stream, pattern, cells);
}

void launch_copy_blocks(const kernels::BlockCopy& copy, cudaStream_t stream) {
  launch(kernels::copy_blocks, dim3(copy.pattern.rows, kTogether), kernels::kBlockThreads, stream,
         copy);
}

void launch_mirror_blocks(const kernels::Pattern& pattern, void* values, ScalarType dtype, int edge,
                          void* norms, cudaStream_t stream) {
  with_element(dtype, [&]<class Element>(Element) {
    launch(kernels::mirror_blocks<Element>, dim3(pattern.rows, kTogether), kernels::kSquareThreads,
           stream, pattern, static_cast<Element*>(values), edge,
           static_cast<kernels::NormOf<Element>*>(norms));
  });
}

template struct CsrKernels<float>;
template struct CsrKernels<double>;

}  // namespace spamm::cuda
