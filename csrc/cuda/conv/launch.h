// Launches of the convolutions that are slow to compile (cuda/instances.in). `how.stream` is the
// current stream. The result is the error code of the driver or the launch.
#pragma once

#include <cuda_runtime.h>

#include "kernels/common/tile.h"
#include "kernels/conv/sm80/params.h"
#include "kernels/conv/sm90/params.h"

namespace spamm::cuda {

// The portable convolution.
template <class Norm>
using Convolve = cudaError_t(const kernels::ConvSm80Params<Norm>& params,
                             const kernels::Launch& how);
Convolve<float> conv_sm80_f16, conv_sm80_bf16, conv_sm80_tf32, conv_sm80_f32;
Convolve<double> conv_sm80_f64;

// The two stages for blocks that are mostly empty (kernels/conv/sm80/thin.cuh).
enum class ThinStage { kNorms, kMultiply };
template <class Element, class Norm>
cudaError_t launch_thin(const kernels::ThinParams<Norm>& params, ThinStage stage,
                        cudaStream_t stream);
// Depthwise. `most_bytes`: the shared memory that a thread block may have.
template <class Element, class Norm>
cudaError_t launch_thin(const kernels::DepthwiseParams<Norm>& params, int most_bytes,
                        cudaStream_t stream);

// Hopper's. The caller sets all of `params` but the maps; next_tile, if not null, points to zero.
template <class Element>
cudaError_t launch_conv(const kernels::conv::sm90::ConvParams& params, const void* input,
                        const void* weight, const kernels::Launch& how);

// The same with ReLU and max pooling (kernels/conv/sm90/pool_windows.cuh), for half types.
template <class Element>
cudaError_t launch_conv_pool(const kernels::conv::sm90::ConvParams& params, const void* input,
                             const void* weight, const kernels::Launch& how);

// The launch where nothing is skipped (kernels/conv/sm90/unskipped.cuh). `tile` is one of
// kUnskippedTiles. The caller sets shape, bias, residual, activation, output and shares_weights.
template <class Element>
cudaError_t launch_unskipped(const kernels::conv::sm90::UnskippedParams& params, const void* input,
                             const void* weight, const kernels::UnskippedTile& tile,
                             int multiprocessors, cudaStream_t stream);

// For float32 in split parts. The caller also sets a and b of `params`. A pixel block is one pixel
// of several images.
cudaError_t launch_conv_f32x3(const kernels::conv::sm90::SplitConvParams& params,
                              const kernels::Launch& how);

}  // namespace spamm::cuda
