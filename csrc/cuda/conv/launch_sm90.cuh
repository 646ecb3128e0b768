// The launches that instances/sm90_*.cu share.
#pragma once

#include <c10/cuda/CUDAException.h>

#include "cuda/conv/launch_sm90.h"
#include "kernels/conv/sm90/launch.cuh"

namespace spamm::cuda {

template <class Element>
void launch_pixel_norms(const kernels::conv::PixelNormsParams& params, cudaStream_t stream) {
  C10_CUDA_CHECK(kernels::conv::pixel_norms<Element>(params, true, stream));
}

template <class Element>
void launch_conv(const kernels::conv::ConvParams& params, const void* input, const void* weight,
                 kernels::conv::TileSize tile, int multiprocessors, cudaStream_t stream) {
  C10_CUDA_CHECK(
      kernels::conv::conv2d<Element>(params, input, weight, tile, multiprocessors, true, stream));
}

}  // namespace spamm::cuda
