// float64 convolution on tensor cores.
#include "cuda/conv/launch_sm80.h"
#include "cuda/tiles.h"
#include "kernels/conv/sm80/launch.cuh"
#include "kernels/multiply/sm80/tensor_core_engine.cuh"

namespace spamm::cuda {

cudaError_t conv_sm80_f64(const kernels::ConvSm80Params<double>& params,
                          const kernels::Launch& how) {
  using Engine = kernels::TensorCoreEngine<kernels::MmaF64>;
  return kernels::sm80::convolve<Engine, kTilesOf<ConvKernel::kSm80F64>>(params, how);
}

}  // namespace spamm::cuda
