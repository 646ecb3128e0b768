#include <c10/cuda/CUDAException.h>

#include "kernels/norm_map.cuh"
#include "norm_map_launch.h"

namespace spamm::cuda {
namespace {

template <class Element>
void launch(const kernels::NormMapParams<kernels::NormOf<Element>>& p, bool vector,
            cudaStream_t stream) {
  const int64_t norms = p.batch * (((p.lines - 1) >> p.log2_block_lines) + 1) *
                        (((p.length - 1) >> p.log2_block_length) + 1);
  const int warps = kernels::norm_warps<Element>(p.log2_block_lines + p.log2_block_length);
  const auto blocks = static_cast<unsigned>((norms - 1) / (kernels::kNormWarps / warps) + 1);
  kernels::norm_map<Element><<<blocks, kernels::kNormThreads, 0, stream>>>(p, vector);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace

template <>
void launch_norm_map(const kernels::NormMapParams<float>& params, c10::ScalarType dtype,
                     bool vector, cudaStream_t stream) {
  switch (dtype) {
    case c10::ScalarType::Half:
      return launch<__half>(params, vector, stream);
    case c10::ScalarType::BFloat16:
      return launch<__nv_bfloat16>(params, vector, stream);
    default:
      return launch<float>(params, vector, stream);
  }
}

template <>
void launch_norm_map(const kernels::NormMapParams<double>& params, c10::ScalarType, bool vector,
                     cudaStream_t stream) {
  launch<double>(params, vector, stream);
}

}  // namespace spamm::cuda
