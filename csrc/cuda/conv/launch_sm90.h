// Launches of the Hopper convolution and its norms. Each type has its own file, because it is slow
// to compile. The stream is the current stream. Each kernel may start before the previous kernel on
// the stream has ended (kernels/common/overlap.cuh). The result is the error code of the driver or
// the launch.
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
cudaError_t launch_deviation_pool(const kernels::conv::sm90::DeviationPoolParams& params,
                                  cudaStream_t stream);

template <class Element>
cudaError_t launch_few_channels(const kernels::conv::sm90::FewChannelsParams& params,
                                int multiprocessors, cudaStream_t stream);

// Sets a tile counter to zero.
cudaError_t launch_clear_counter(int* counter, cudaStream_t stream);

cudaError_t launch_block_norms(const kernels::conv::sm90::BlockNormsParams& params,
                               cudaStream_t stream);

// The caller sets all of `params` but a and b; next_tile, if not null, points to zero.
template <class Element>
cudaError_t launch_conv(const kernels::conv::sm90::ConvParams& params, const void* input,
                        const void* weight, const kernels::Launch& how);

// Where nothing is skipped (kernels/conv/sm90/unskipped.cuh). `tile` is one of kUnskippedTiles. The
// caller sets shape, bias, residual, activation, output, weight_is_ready and shares_weights.
template <class Element>
cudaError_t launch_unskipped(const kernels::conv::sm90::ConvParams& params, const void* input,
                             const void* weight, const kernels::UnskippedTile& tile,
                             int multiprocessors, cudaStream_t stream);

// The same for deviations from a reference, in pixel blocks of one image.
template <class Element>
cudaError_t launch_deviation_conv(const kernels::conv::sm90::ConvParams& params, const void* input,
                                  const void* weight, const kernels::Launch& how);

// The same for float32 in split parts. The caller also sets a and b of `params`. A pixel block is
// one pixel of several images.
cudaError_t launch_conv_f32x3(const kernels::conv::sm90::ConvParams& params,
                              const kernels::Launch& how);

}  // namespace spamm::cuda
