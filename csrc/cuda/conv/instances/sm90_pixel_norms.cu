// The norms of the pixels of an input and a weight.
#include "cuda/conv/launch_sm90.h"
#include "kernels/conv/sm90/norms.cuh"

namespace spamm::cuda {

template <class Element>
cudaError_t launch_pixel_norms(const kernels::conv::sm90::PixelNormsParams& params,
                               cudaStream_t stream) {
  return kernels::conv::sm90::launch_pixel_norms<Element>(params, stream);
}

template cudaError_t launch_pixel_norms<__half>(const kernels::conv::sm90::PixelNormsParams&,
                                                cudaStream_t);
template cudaError_t launch_pixel_norms<__nv_bfloat16>(const kernels::conv::sm90::PixelNormsParams&,
                                                       cudaStream_t);
template cudaError_t launch_pixel_norms<float>(const kernels::conv::sm90::PixelNormsParams&,
                                               cudaStream_t);

}  // namespace spamm::cuda
