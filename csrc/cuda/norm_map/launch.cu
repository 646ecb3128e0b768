// Starts the kernels that compute norms: their grids, and when they may start early.
#include <c10/cuda/CUDAException.h>

#include <algorithm>
#include <limits>

#include "cuda/norm_map/norm_map.h"
#include "kernels/common/launch.cuh"
#include "kernels/conv/sm80/norms.cuh"
#include "kernels/multiply/complete_symmetric.cuh"
#include "kernels/norm_map/norm_map.cuh"

namespace spamm::cuda {
namespace {

using c10::ScalarType;
using kernels::NormMapParams, kernels::NormOf;

// Small thread blocks spread small matrices over the device. Only the largest groups need larger.
constexpr int kLeastThreads = 128;

template <class Norm>
int log2_block_entries(const NormMapParams<Norm>& p) {
  return p.log2_block_lines + p.log2_block_length;
}

template <class Element>
unsigned thread_blocks(const NormMapParams<NormOf<Element>>& p, int threads) {
  const int64_t norms = p.batch * (((p.lines - 1) >> p.log2_block_lines) + 1) *
                        (((p.length - 1) >> p.log2_block_length) + 1);
  const int groups = threads / kernels::norm_threads<Element>(log2_block_entries(p));
  return static_cast<unsigned>((norms - 1) / groups + 1);
}

// The most thread blocks with which the kernel starts before the previous one ends. This pays if
// the whole grid fits on the device: the kernel is then so short that its launch matters. Larger
// grids get slower. 0 if the kernel's code has no wait. `threads` is one of two numbers.
unsigned most_early_blocks(const void* kernel, int threads, int multiprocessors) {
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
    found = static_cast<unsigned>(per_multiprocessor * multiprocessors);
    return error;
  }));
  return most;
}

template <class Element>
void launch_maps(c10::ArrayRef<MapJob> jobs, int* zeroed, int multiprocessors,
                 cudaStream_t stream) {
  kernels::MatrixPair<NormMapParams<NormOf<Element>>> pair{};
  int threads = kLeastThreads;
  bool copies = false;
  for (size_t i = 0; i < jobs.size(); ++i) {
    const MapJob& job = jobs[i];
    auto& params = pair.matrices[i] =
        norm_map_params<NormOf<Element>>(job.matrices, job.block_rows, job.block_columns, job.map);
    params.copy = job.copy;
    params.copy_batch_stride = job.copy_batch_stride;
    params.copy_line_stride = job.copy_line_stride;
    copies = copies || job.copy != nullptr;
    threads =
        std::max(threads, kernels::norm_threads<Element>(log2_block_entries(pair.matrices[i])));
  }
  unsigned blocks = pair.second_begins = thread_blocks<Element>(pair.matrices[0], threads);
  if (jobs.size() == 2) blocks += thread_blocks<Element>(pair.matrices[1], threads);
  // Two maps of the largest size, with a thread block for each norm, would exceed the largest grid.
  TORCH_CHECK(blocks <= 0x7fffffffu,
              "the norm maps of a and b need at most 2^31 - 1 thread blocks; got ", blocks);
  const auto kernel = copies ? kernels::norm_map<Element, true> : kernels::norm_map<Element, false>;
  const bool early =
      blocks <= most_early_blocks(reinterpret_cast<const void*>(kernel), threads, multiprocessors);
  C10_CUDA_CHECK(kernels::launch_with(kernels::overlapping(early), kernel, blocks, threads, 0,
                                      /*overlap_previous=*/false, stream, pair, zeroed));
}

}  // namespace

bool write_norm_maps(c10::ArrayRef<MapJob> jobs, ScalarType dtype, int* zeroed, int multiprocessors,
                     cudaStream_t stream) {
  while (!jobs.empty() && jobs.front().norms() == 0) jobs = jobs.slice(1);
  while (!jobs.empty() && jobs.back().norms() == 0) jobs = jobs.slice(0, jobs.size() - 1);
  if (jobs.empty()) return false;
  with_element(dtype, [&]<class Element>(Element) {
    launch_maps<Element>(jobs, zeroed, multiprocessors, stream);
  });
  return true;
}

template <class Norm>
void launch_im2col_norms(const kernels::Im2colNormsParams<Norm>& params, ScalarType dtype,
                         cudaStream_t stream) {
  const kernels::Im2colMatrix& m = params.matrix;
  const int64_t norms = m.groups * (m.depth() >> params.log2_block_k) * m.block_count();
  with_element(dtype, [&]<class Element>(Element) {
    if constexpr (std::is_same_v<NormOf<Element>, Norm>) {
      const int threads = kernels::norm_threads<Element>(m.log2_block() + params.log2_block_k);
      const auto blocks =
          static_cast<unsigned>((norms - 1) / (kernels::kNormThreads / threads) + 1);
      kernels::im2col_norms<Element><<<blocks, kernels::kNormThreads, 0, stream>>>(params);
      C10_CUDA_KERNEL_LAUNCH_CHECK();
    }
  });
}
template void launch_im2col_norms(const kernels::Im2colNormsParams<float>&, ScalarType,
                                  cudaStream_t);
template void launch_im2col_norms(const kernels::Im2colNormsParams<double>&, ScalarType,
                                  cudaStream_t);

void launch_complete_symmetric(const SquareMatrices& c, ScalarType dtype, int log2_block,
                               void* norms, cudaStream_t stream) {
  const int64_t squares = blocks_of(c.size, kernels::kSquare);
  const int64_t blocks = c.batch * squares * (squares + 1) / 2;
  TORCH_CHECK(blocks <= std::numeric_limits<int32_t>::max(),
              "a symmetric product must have at most 2^31 - 1 squares of 64 x 64; got shape [",
              c.batch, ", ", c.size, ", ", c.size, "]");
  with_element(dtype, [&]<class Element>(Element) {
    const kernels::SymmetricParams<Element> params = {.c = static_cast<Element*>(c.data),
                                                      .batch_stride = c.batch_stride,
                                                      .leading = c.leading,
                                                      .size = c.size,
                                                      .norms = static_cast<NormOf<Element>*>(norms),
                                                      .log2_block = log2_block};
    C10_CUDA_CHECK(kernels::launch(kernels::complete_symmetric<Element>,
                                   static_cast<unsigned>(blocks), kernels::kSquareThreads, 0, true,
                                   stream, params, static_cast<int>(squares)));
  });
}

}  // namespace spamm::cuda
