// bfloat16 convolution on Hopper's tensor cores, float32 sums.
#include "cuda/conv/launch_sm90.cuh"

namespace spamm::cuda {

template void launch_pixel_norms<__nv_bfloat16>(const kernels::conv::PixelNormsParams&,
                                                cudaStream_t);
template void launch_conv<__nv_bfloat16>(const kernels::conv::ConvParams&, const void*, const void*,
                                         kernels::conv::TileSize, int, cudaStream_t);

}  // namespace spamm::cuda
