// float64 convolution on tensor cores.
#include "kernels/conv/sm80/launch.cuh"
#include "kernels/multiply/sm80/tensor_core_engine.cuh"

namespace spamm::cuda {

void conv_f64(const kernels::ConvSm80Params<double>& params, Tile tile, int multiprocessors,
              cudaStream_t stream) {
  using Large = kernels::TileShape<128, 64, 32, 32, 4, 2>;
  using Small = kernels::TileShape<64, 64, 32, 32, 4, 3>;
  launch_conv<kernels::TensorCoreEngine<kernels::MmaF64>, Large, Small>(params, tile,
                                                                        multiprocessors, stream);
}

}  // namespace spamm::cuda
