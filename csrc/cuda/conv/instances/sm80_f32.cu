// float32 convolution at full accuracy.
#include "cuda/conv/launch_sm80.h"
#include "cuda/tiles.h"
#include "kernels/conv/sm80/launch.cuh"
#include "kernels/multiply/sm80/simt_engine.cuh"

namespace spamm::cuda {

cudaError_t conv_sm80_f32(const kernels::ConvSm80Params<float>& params,
                          const kernels::Launch& how) {
  using Engine = kernels::SimtF32Engine;
  return kernels::sm80::convolve<Engine, kTilesOf<ConvKernel::kSm80F32>>(params, how);
}

}  // namespace spamm::cuda
