// float32 convolution on tensor cores, rounded to TF32.
#include "cuda/conv/launch_sm80.h"
#include "cuda/tiles.h"
#include "kernels/conv/sm80/launch.cuh"
#include "kernels/multiply/sm80/tensor_core_engine.cuh"

namespace spamm::cuda {

cudaError_t conv_sm80_tf32(const kernels::ConvSm80Params<float>& params,
                           const kernels::Launch& how) {
  using Engine = kernels::TensorCoreEngine<kernels::MmaTf32>;
  return kernels::sm80::convolve<Engine, kTilesOf<ConvKernel::kSm80Tf32>>(params, how);
}

}  // namespace spamm::cuda
