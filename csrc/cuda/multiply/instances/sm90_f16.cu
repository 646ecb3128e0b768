// float16 on Hopper's tensor cores, float32 sums.
#include "cuda/multiply/launch_sm90.cuh"

namespace spamm::cuda {

void multiply_sm90_f16(const kernels::MultiplyParams<float>& params, Tile tile, int multiprocessors,
                       cudaStream_t stream) {
  launch_multiply_sm90<__half>(params, tile, multiprocessors, stream);
}

}  // namespace spamm::cuda
