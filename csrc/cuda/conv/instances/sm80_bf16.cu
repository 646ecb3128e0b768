// bfloat16 convolution on tensor cores, float32 sums.
#include "cuda/conv/launch_sm80.h"
#include "cuda/tiles.h"
#include "kernels/conv/sm80/launch.cuh"
#include "kernels/multiply/sm80/tensor_core_engine.cuh"

namespace spamm::cuda {

cudaError_t conv_sm80_bf16(const kernels::ConvSm80Params<float>& params,
                           const kernels::Launch& how) {
  using Engine = kernels::TensorCoreEngine<kernels::MmaBf16>;
  return kernels::sm80::convolve<Engine, kTilesOf<ConvKernel::kSm80Bf16>>(params, how);
}

}  // namespace spamm::cuda
