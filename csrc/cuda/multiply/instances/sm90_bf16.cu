// bfloat16 on Hopper's tensor cores, float32 sums.
#include "cuda/multiply/launch.h"
#include "cuda/tiles.h"
#include "kernels/multiply/sm90/launch.cuh"

namespace spamm::cuda {

cudaError_t multiply_sm90_bf16(const kernels::MultiplyParams<float>& params,
                               const kernels::Launch& how) {
  return kernels::multiply::sm90::multiply<__nv_bfloat16, kTilesOf<Kernel::kSm90Bf16>>(params, how);
}

}  // namespace spamm::cuda
