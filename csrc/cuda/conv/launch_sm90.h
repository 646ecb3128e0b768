// Starts the Hopper convolution and its norms: one file for each type, because each is slow to
// compile. The stream is the current one; each kernel may begin while the one before it there ends.
// All return what the driver or the launch says.
#pragma once

#include <cuda_runtime.h>

#include "kernels/common/tile.h"
#include "kernels/conv/sm90/few_channels_params.h"
#include "kernels/conv/sm90/params.h"

namespace spamm::cuda {

template <class Element>
cudaError_t launch_pixel_norms(const kernels::conv::sm90::PixelNormsParams& params,
                               cudaStream_t stream);

template <class Element>
cudaError_t launch_max_pool(const kernels::conv::sm90::MaxPoolParams& params, cudaStream_t stream);

template <class Element>
cudaError_t launch_few_channels(const kernels::conv::sm90::FewChannelsParams& params,
                                cudaStream_t stream);

cudaError_t launch_block_norms(const kernels::conv::sm90::BlockNormsParams& params,
                               cudaStream_t stream);

// shape, block, norms, log2_block_m and _k, tau, bias, relu, output and next_tile (zero) of
// `params` are given.
template <class Element>
cudaError_t launch_conv(const kernels::conv::sm90::ConvParams& params, const void* input,
                        const void* weight, const kernels::Launch& how);

// The same for float32 in split parts: a and b of `params` are given as well, pixel blocks are of
// images alone.
cudaError_t launch_conv_f32x3(const kernels::conv::sm90::ConvParams& params,
                              const kernels::Launch& how);

}  // namespace spamm::cuda
