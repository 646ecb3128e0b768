// float16 convolution on Hopper's tensor cores, float32 sums.
#include "cuda/conv/launch_sm90.cuh"
#include "kernels/conv/sm90/block_norms_launch.cuh"

namespace spamm::cuda {

void launch_block_norms(const kernels::conv::BlockNormsParams& params, cudaStream_t stream) {
  C10_CUDA_CHECK(kernels::conv::block_norms(params, true, stream));
}

template void launch_pixel_norms<__half>(const kernels::conv::PixelNormsParams&, cudaStream_t);
template void launch_conv<__half>(const kernels::conv::ConvParams&, const void*, const void*,
                                  kernels::conv::TileSize, int, cudaStream_t);

}  // namespace spamm::cuda
