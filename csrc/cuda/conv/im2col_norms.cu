// Starts the kernel that computes norms of im2col blocks from the input (sm_80 and newer).
#include <c10/cuda/CUDAException.h>

#include "cuda/conv/im2col_norms.h"
#include "kernels/conv/sm80/norms.cuh"

namespace spamm::cuda {
namespace {

template <class Element, class Norm>
void launch(const kernels::Im2colNormsParams<Norm>& params, cudaStream_t stream) {
  const kernels::Im2colMatrix& m = params.matrix;
  const int64_t norms = m.groups * (m.depth() >> params.log2_block_k) * m.block_count();
  const int threads = kernels::norm_threads<Element>(m.log2_block() + params.log2_block_k);
  const auto blocks = static_cast<unsigned>((norms - 1) / (kernels::kNormThreads / threads) + 1);
  kernels::im2col_norms<Element><<<blocks, kernels::kNormThreads, 0, stream>>>(params);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace

template <>
void launch_im2col_norms(const kernels::Im2colNormsParams<float>& params, c10::ScalarType dtype,
                         cudaStream_t stream) {
  switch (dtype) {
    case c10::ScalarType::Half:
      return launch<__half>(params, stream);
    case c10::ScalarType::BFloat16:
      return launch<__nv_bfloat16>(params, stream);
    default:
      return launch<float>(params, stream);
  }
}

template <>
void launch_im2col_norms(const kernels::Im2colNormsParams<double>& params, c10::ScalarType,
                         cudaStream_t stream) {
  launch<double>(params, stream);
}

}  // namespace spamm::cuda
