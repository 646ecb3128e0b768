// float64 on tensor cores.
#include "kernels/multiply/sm80/launch.cuh"
#include "kernels/multiply/sm80/tensor_core_engine.cuh"

namespace spamm::cuda {

void multiply_f64(const kernels::MultiplyParams<double>& params, Tile tile, int multiprocessors,
                  cudaStream_t stream) {
  using Large = kernels::TileShape<128, 64, 32, 32, 4, 2>;
  using Small = kernels::TileShape<64, 64, 32, 32, 4, 3>;
  launch_multiply<kernels::TensorCoreEngine<kernels::MmaF64>, Large, Small>(
      params, tile, multiprocessors, stream);
}

}  // namespace spamm::cuda
