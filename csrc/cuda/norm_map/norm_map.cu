// norm_map on CUDA: turns tensors into kernel parameters and starts the kernel, with thread blocks
// for one or two matrices.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <torch/library.h>

#include <algorithm>
#include <limits>
#include <tuple>

#include "checks.h"
#include "cuda/norm_map/norm_map.h"
#include "kernels/common/launch.cuh"
#include "kernels/norm_map/norm_map.cuh"
#include "stage_range.h"

namespace spamm::cuda {
namespace {

using at::Tensor;

// Small thread blocks spread small matrices over more of the device. Only the largest groups of
// threads need larger ones.
constexpr int kLeastThreads = 128;

template <class Norm>
int log2_block_entries(const kernels::NormMapParams<Norm>& p) {
  return p.log2_block_lines + p.log2_block_length;
}

// The number of thread blocks of `threads` threads for one matrix.
template <class Element>
unsigned thread_blocks(const kernels::NormMapParams<kernels::NormOf<Element>>& p, int threads) {
  const int64_t norms = p.batch * (((p.lines - 1) >> p.log2_block_lines) + 1) *
                        (((p.length - 1) >> p.log2_block_length) + 1);
  const int groups = threads / kernels::norm_threads<Element>(log2_block_entries(p));
  return static_cast<unsigned>((norms - 1) / groups + 1);
}

// The most thread blocks with which the kernel starts before the previous one ends. This pays if
// the whole grid fits on the device: the kernel is then so short that its launch matters. Larger
// grids get slower. 0 if the kernel's code has no wait. `threads` is one of two numbers.
unsigned most_early_blocks(const void* kernel, int threads, const OnDevice& device) {
  static kernels::PerKernel<unsigned> known[2];
  unsigned most = 0;
  C10_CUDA_CHECK(known[threads > kLeastThreads].find(kernel, most, [&](unsigned& found) {
    bool waits = false;
    int per_multiprocessor = 0;
    cudaError_t error = kernels::find_waits(kernel, waits);
    if (error == cudaSuccess && waits) {
      error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_multiprocessor, kernel, threads,
                                                            /*dynamicSMemSize=*/0);
    }
    found = static_cast<unsigned>(per_multiprocessor * device.multiprocessors());
    return error;
  }));
  return most;
}

template <class Element>
void launch(at::ArrayRef<MapJob> jobs, int* zeroed, const OnDevice& device) {
  using Norm = kernels::NormOf<Element>;
  kernels::MatrixPair<kernels::NormMapParams<Norm>> pair{};
  int threads = kLeastThreads;
  for (size_t i = 0; i < jobs.size(); ++i) {
    const MapJob& job = jobs[i];
    pair.matrices[i] =
        norm_map_params<Norm>(job.matrices, job.block_rows, job.block_columns, job.map);
    threads =
        std::max(threads, kernels::norm_threads<Element>(log2_block_entries(pair.matrices[i])));
  }
  unsigned blocks = pair.second_begins = thread_blocks<Element>(pair.matrices[0], threads);
  if (jobs.size() == 2) blocks += thread_blocks<Element>(pair.matrices[1], threads);
  // Two maps of the largest size, with a thread block for each norm, would exceed the largest grid.
  TORCH_CHECK(blocks <= 0x7fffffffu,
              "the norm maps of a and b need at most 2^31 - 1 thread blocks; ", "got ", blocks);
  const auto kernel = kernels::norm_map<Element>;
  const bool early =
      blocks <= most_early_blocks(reinterpret_cast<const void*>(kernel), threads, device);
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = blocks;
  config.blockDim = threads;
  config.stream = device.stream();
  config.attrs = &overlap;
  config.numAttrs = early ? 1 : 0;
  C10_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, pair, zeroed));
}

// A map of `a`, not computed yet. The second is what computes it: all batch dimensions are one. It
// copies `a` to `kept` only if no single stride can describe them.
std::tuple<Tensor, MapJob> new_map(const Tensor& a, int64_t rows, int64_t columns, const char* name,
                                   Tensor& kept) {
  DimVector shape(a.sizes());
  shape.end()[-2] = blocks_of(a.size(-2), rows);
  shape.end()[-1] = blocks_of(a.size(-1), columns);
  const Tensor map = at::empty(shape, a.options().dtype(norm_dtype(a.scalar_type())));
  check_blocks(map.numel(), name, a.sizes());
  kept = a.dim() > 3 ? a.flatten(0, -3) : a;
  return {map, job_for(kept, rows, columns, map.mutable_data_ptr())};
}

Tensor norm_map_op(const Tensor& a, at::IntArrayRef block) {
  check_operand_dtype(a.scalar_type(), "a");
  check_block_pair(block);
  check_matrices(a, "a");
  const OnDevice device(a);
  Tensor kept;
  const auto [map, job] = new_map(a, block[0], block[1], "a", kept);
  write_norm_maps(job, a.scalar_type(), nullptr, device);
  return map;
}

std::tuple<Tensor, Tensor> norm_maps_op(const Tensor& a, const Tensor& b, at::IntArrayRef block) {
  const Block edges = check_block(block);
  check_matrix_pair(a, b);
  const OnDevice device(a);
  const StageRange stage(kNormMapStage);
  Tensor kept_a, kept_b;
  const auto [map_a, job_a] = new_map(a, edges.m, edges.k, "a", kept_a);
  const auto [map_b, job_b] = new_map(b, edges.k, edges.n, "b", kept_b);
  write_norm_maps({job_a, job_b}, a.scalar_type(), nullptr, device);
  return {map_a, map_b};
}

}  // namespace

void check_blocks(int64_t norms, const char* name, at::IntArrayRef shape) {
  TORCH_CHECK(norms <= std::numeric_limits<int32_t>::max(), name,
              " must have at most 2^31 - 1 blocks; got ", norms, " for shape ", shape);
}

bool write_norm_maps(at::ArrayRef<MapJob> jobs, at::ScalarType dtype, int* zeroed,
                     const OnDevice& device) {
  while (!jobs.empty() && jobs.front().norms() == 0) jobs = jobs.slice(1);
  while (!jobs.empty() && jobs.back().norms() == 0) jobs = jobs.slice(0, jobs.size() - 1);
  if (jobs.empty()) return false;
  switch (dtype) {
    case at::kHalf:
      launch<__half>(jobs, zeroed, device);
      break;
    case at::kBFloat16:
      launch<__nv_bfloat16>(jobs, zeroed, device);
      break;
    case at::kFloat:
      launch<float>(jobs, zeroed, device);
      break;
    default:
      launch<double>(jobs, zeroed, device);
  }
  return true;
}

void norm_map_into(const Tensor& a, int64_t rows, int64_t columns, const Tensor& map,
                   const OnDevice& device) {
  check_blocks(map.numel(), "a", a.sizes());
  write_norm_maps(job_for(a, rows, columns, map.mutable_data_ptr()), a.scalar_type(), nullptr,
                  device);
}

TORCH_LIBRARY_IMPL(spamm_torch, CUDA, m) {
  m.impl("norm_map", &norm_map_op);
  m.impl("norm_maps", &norm_maps_op);
}

}  // namespace spamm::cuda
