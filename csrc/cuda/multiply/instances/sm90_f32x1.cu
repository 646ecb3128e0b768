// float32 at TF32's accuracy on Hopper's tensor cores: one product of split parts.
#include "cuda/multiply/launch.h"
#include "cuda/tiles.h"
#include "kernels/multiply/sm90/split/launch.cuh"

namespace spamm::cuda {

cudaError_t multiply_sm90_f32x1(const kernels::MultiplyParams<float>& params,
                                const kernels::SplitSource& a, const kernels::SplitSource& b,
                                int16_t* terms, const kernels::Launch& how) {
  return kernels::multiply::sm90::multiply_split<1, kTilesOf<Kernel::kSm90F32x1>>(params, a, b,
                                                                                  terms, how);
}

}  // namespace spamm::cuda
