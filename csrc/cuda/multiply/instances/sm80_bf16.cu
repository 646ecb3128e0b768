// bfloat16 on tensor cores, float32 sums.
#include "cuda/multiply/launch.h"
#include "cuda/tiles.h"
#include "kernels/multiply/sm80/launch.cuh"
#include "kernels/multiply/sm80/tensor_core_engine.cuh"

namespace spamm::cuda {

cudaError_t multiply_sm80_bf16(const kernels::MultiplyParams<float>& params,
                               const kernels::Launch& how) {
  using Engine = kernels::TensorCoreEngine<kernels::MmaBf16>;
  return kernels::sm80::multiply<Engine, kTilesOf<Kernel::kSm80Bf16>>(params, how);
}

}  // namespace spamm::cuda
