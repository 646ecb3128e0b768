// Starts the norm kernel: thread blocks for one or two matrices.
#include <c10/cuda/CUDAException.h>

#include <algorithm>

#include "cuda/norm_map/launch.h"
#include "kernels/common/launch.cuh"
#include "kernels/norm_map/norm_map.cuh"

namespace spamm::cuda {
namespace {

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

// Whether the kernel is launched to start before the previous one ends. This pays if the whole grid
// fits on the device: the kernel is then so short that its launch matters. Larger grids get slower.
bool starts_early(const void* kernel, unsigned blocks, int threads, const OnDevice& device) {
  bool waits = false;
  C10_CUDA_CHECK(kernels::find_waits(kernel, waits));
  if (!waits) return false;
  int per_multiprocessor = 0;
  C10_CUDA_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_multiprocessor, kernel, threads,
                                                               /*dynamicSMemSize=*/0));
  return blocks <= static_cast<unsigned>(per_multiprocessor * device.multiprocessors());
}

template <class Element, class Norm>
void launch(const kernels::NormMapParams<Norm>* params, int count, int* zeroed,
            const OnDevice& device) {
  int threads = kLeastThreads;
  for (int i = 0; i < count; ++i) {
    threads = std::max(threads, kernels::norm_threads<Element>(log2_block_entries(params[i])));
  }
  kernels::MatrixPair<kernels::NormMapParams<Norm>> pair{};
  pair.matrices[0] = params[0];
  pair.second_begins = thread_blocks<Element>(params[0], threads);
  unsigned blocks = pair.second_begins;
  if (count == 2) {
    pair.matrices[1] = params[1];
    blocks += thread_blocks<Element>(params[1], threads);
  }
  // Two maps of the largest size, with a thread block for each norm, would exceed the largest grid.
  TORCH_CHECK(blocks <= 0x7fffffffu,
              "the norm maps of a and b need at most 2^31 - 1 thread blocks; ", "got ", blocks);
  const auto kernel = kernels::norm_map<Element>;
  const bool early = starts_early(reinterpret_cast<const void*>(kernel), blocks, threads, device);
  C10_CUDA_CHECK(kernels::launch(kernel, blocks, threads, 0, early, device.stream(), pair, zeroed));
}

}  // namespace

template <>
void launch_norm_maps(const kernels::NormMapParams<float>* params, int count, c10::ScalarType dtype,
                      int* zeroed, const OnDevice& device) {
  switch (dtype) {
    case c10::ScalarType::Half:
      return launch<__half>(params, count, zeroed, device);
    case c10::ScalarType::BFloat16:
      return launch<__nv_bfloat16>(params, count, zeroed, device);
    default:
      return launch<float>(params, count, zeroed, device);
  }
}

template <>
void launch_norm_maps(const kernels::NormMapParams<double>* params, int count, c10::ScalarType,
                      int* zeroed, const OnDevice& device) {
  launch<double>(params, count, zeroed, device);
}

}  // namespace spamm::cuda
