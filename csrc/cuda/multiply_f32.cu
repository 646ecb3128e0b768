// float32 at full accuracy.
#include "kernels/engine_simt_f32.cuh"
#include "multiply_launch.cuh"

namespace spamm::cuda {

void multiply_f32(const kernels::MultiplyParams<float>& params, Tile tile, int multiprocessors,
                  cudaStream_t stream) {
  using Large = kernels::TileShape<64, 128, 32, 64, 4, 2>;
  using Small = kernels::TileShape<64, 64, 32, 32, 4, 2>;
  launch_multiply<kernels::SimtF32Engine, Large, Small>(params, tile, multiprocessors, stream);
}

}  // namespace spamm::cuda
