// float64 on tensor cores.
#include "cuda/multiply/launch.h"
#include "cuda/tiles.h"
#include "kernels/multiply/sm80/launch.cuh"
#include "kernels/multiply/sm80/tensor_core_engine.cuh"

namespace spamm::cuda {

cudaError_t multiply_sm80_f64(const kernels::MultiplyParams<double>& params,
                              const kernels::Launch& how) {
  using Engine = kernels::TensorCoreEngine<kernels::MmaF64>;
  return kernels::sm80::multiply<Engine, kTilesOf<Kernel::kSm80F64>>(params, how);
}

}  // namespace spamm::cuda
