// float32 at full accuracy.
#include "cuda/multiply/launch.h"
#include "cuda/tiles.h"
#include "kernels/multiply/sm80/launch.cuh"
#include "kernels/multiply/sm80/simt_engine.cuh"

namespace spamm::cuda {

cudaError_t multiply_sm80_f32(const kernels::MultiplyParams<float>& params,
                              const kernels::Launch& how) {
  using Engine = kernels::SimtF32Engine;
  return kernels::sm80::multiply<Engine, kTilesOf<Kernel::kSm80F32>>(params, how);
}

}  // namespace spamm::cuda
