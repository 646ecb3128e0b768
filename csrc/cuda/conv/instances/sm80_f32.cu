// float32 convolution at full accuracy.
#include "kernels/conv/sm80/launch.cuh"
#include "kernels/multiply/sm80/simt_engine.cuh"

namespace spamm::cuda {

void conv_f32(const kernels::ConvSm80Params<float>& params, Tile tile, int multiprocessors,
              cudaStream_t stream) {
  using Large = kernels::TileShape<128, 64, 32, 32, 4, 1>;
  using Small = kernels::TileShape<64, 64, 32, 32, 4, 2>;
  launch_conv<kernels::SimtF32Engine, Large, Small>(params, tile, multiprocessors, stream);
}

}  // namespace spamm::cuda
