// float16 convolution on tensor cores, float32 sums.
#include "kernels/conv/sm80/launch.cuh"
#include "kernels/multiply/sm80/tensor_core_engine.cuh"

namespace spamm::cuda {

void conv_f16(const kernels::ConvSm80Params<float>& params, Tile tile, int multiprocessors,
              cudaStream_t stream) {
  using Large = kernels::TileShape<128, 128, 64, 64, 4, 2>;
  using Small = kernels::TileShape<64, 64, 32, 32, 4, 4>;
  launch_conv<kernels::TensorCoreEngine<kernels::MmaF16>, Large, Small>(params, tile,
                                                                        multiprocessors, stream);
}

}  // namespace spamm::cuda
