// Starts the Hopper convolution and its norms: one file for each type, because each is slow to
// compile. `stream` is the current one; each kernel may begin while the one before it there ends.
#pragma once

#include <cuda_runtime.h>

#include "kernels/conv/sm90/few_channels_params.h"
#include "kernels/conv/sm90/params.h"

namespace spamm::cuda {

template <class Element>
void launch_pixel_norms(const kernels::conv::PixelNormsParams& params, cudaStream_t stream);

template <class Element>
void launch_max_pool(const kernels::conv::MaxPoolParams& params, cudaStream_t stream);

template <class Element>
void launch_few_channels(const kernels::conv::FewChannelsParams& params, cudaStream_t stream);

void launch_block_norms(const kernels::conv::BlockNormsParams& params, cudaStream_t stream);

// shape, block, norms, log2_block_m and _k, tau, bias, relu, output and next_tile (zero) of
// `params` are given.
template <class Element>
void launch_conv(const kernels::conv::ConvParams& params, const void* input, const void* weight,
                 kernels::conv::TileSize tile, int multiprocessors, cudaStream_t stream);

// The same for float32 in split parts: a and b of `params` are given as well, pixel blocks are of
// images alone.
void launch_conv_f32x3(const kernels::conv::ConvParams& params, int multiprocessors,
                       cudaStream_t stream);

}  // namespace spamm::cuda
