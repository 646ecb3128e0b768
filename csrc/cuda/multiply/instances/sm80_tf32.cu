// float32 on tensor cores, rounded to TF32.
#include "cuda/multiply/launch.h"
#include "cuda/tiles.h"
#include "kernels/multiply/sm80/launch.cuh"
#include "kernels/multiply/sm80/tensor_core_engine.cuh"

namespace spamm::cuda {

cudaError_t multiply_sm80_tf32(const kernels::MultiplyParams<float>& params,
                               const kernels::Launch& how) {
  using Engine = kernels::TensorCoreEngine<kernels::MmaTf32>;
  return kernels::sm80::multiply<Engine, kTilesOf<Kernel::kSm80Tf32>>(params, how);
}

}  // namespace spamm::cuda
