// bfloat16 convolution on Hopper where nothing is skipped.
#include "cuda/conv/launch_sm90.h"
#include "cuda/tiles.h"
#include "kernels/conv/sm90/launch_unskipped.cuh"

namespace spamm::cuda {

template <>
cudaError_t launch_unskipped<__nv_bfloat16>(const kernels::conv::sm90::ConvParams& params,
                                            const void* input, const void* weight,
                                            const kernels::UnskippedTile& tile, int multiprocessors,
                                            cudaStream_t stream) {
  return kernels::conv::sm90::convolve_unskipped<__nv_bfloat16, kUnskippedTiles>(
      tile, params, input, weight, multiprocessors, stream);
}

}  // namespace spamm::cuda
