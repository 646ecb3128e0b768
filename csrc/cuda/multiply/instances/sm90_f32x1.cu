// float32 at TF32's accuracy on Hopper's tensor cores: one product of split parts.
#include "cuda/multiply/launch_split_sm90.cuh"

namespace spamm::cuda {

void multiply_sm90_f32x1(const kernels::MultiplyParams<float>& params,
                         const kernels::SplitSource& a, const kernels::SplitSource& b, Tile tile,
                         int multiprocessors, cudaStream_t stream) {
  launch_multiply_split<1>(params, a, b, tile, multiprocessors, stream);
}

}  // namespace spamm::cuda
