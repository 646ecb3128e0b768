// bfloat16 on tensor cores, float32 sums.
#include "kernels/multiply/sm80/launch.cuh"
#include "kernels/multiply/sm80/tensor_core_engine.cuh"

namespace spamm::cuda {

void multiply_bf16(const kernels::MultiplyParams<float>& params, Tile tile, int multiprocessors,
                   cudaStream_t stream) {
  using Large = kernels::TileShape<128, 128, 64, 64, 4, 2>;
  using Small = kernels::TileShape<64, 64, 32, 32, 4, 4>;
  launch_multiply<kernels::TensorCoreEngine<kernels::MmaBf16>, Large, Small>(
      params, tile, multiprocessors, stream);
}

}  // namespace spamm::cuda
