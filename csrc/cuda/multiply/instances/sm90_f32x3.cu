// float32 at full accuracy on Hopper's tensor cores: three products of split parts.
#include "cuda/multiply/launch_split_sm90.cuh"

namespace spamm::cuda {

void multiply_sm90_f32x3(const kernels::MultiplyParams<float>& params,
                         const kernels::SplitSource& a, const kernels::SplitSource& b, Tile tile,
                         int multiprocessors, cudaStream_t stream) {
  launch_multiply_split<2>(params, a, b, tile, multiprocessors, stream);
}

}  // namespace spamm::cuda
