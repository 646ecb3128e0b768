// float64 on Hopper's tensor cores.
#include "kernels/engine_tensor_core.cuh"
#include "kernels/multiply_dmma_sm90.cuh"
#include "multiply_launch.cuh"

namespace spamm::cuda {
namespace {

template <class Config_>
struct DriftingKernel {
  using Config = kernels::sm90::DriftConfig<Config_>;
  static constexpr auto kFunction = kernels::sm90::multiply_dmma_sm90<Config>;
};

}  // namespace

void multiply_sm90_f64(const kernels::MultiplyParams<double>& params, Tile tile,
                       int multiprocessors, cudaStream_t stream) {
  using Large = kernels::TileShape<128, 128, 64, 32, 12, 1>;
  using Small = kernels::TileShape<64, 64, 32, 32, 8, 3>;
  launch_multiply<kernels::TensorCoreEngine<kernels::MmaF64Sm90>, Large, Small, DriftingKernel>(
      params, tile, multiprocessors, stream);
}

}  // namespace spamm::cuda
