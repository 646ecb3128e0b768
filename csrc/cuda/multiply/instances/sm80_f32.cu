// float32 at full accuracy.
#include "kernels/multiply/sm80/launch.cuh"
#include "kernels/multiply/sm80/simt_engine.cuh"

namespace spamm::cuda {

void multiply_f32(const kernels::MultiplyParams<float>& params, Tile tile, int multiprocessors,
                  cudaStream_t stream) {
  using Large = kernels::TileShape<64, 128, 32, 64, 4, 2>;
  using Small = kernels::TileShape<64, 64, 32, 32, 4, 2>;
  launch_multiply<kernels::SimtF32Engine, Large, Small>(params, tile, multiprocessors, stream);
}

}  // namespace spamm::cuda
