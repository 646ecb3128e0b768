// Launches of the portable convolution. Each function has its own file, because it is slow to
// compile. `how.stream` is the current stream. The result is the launch's error code.
#pragma once

#include <cuda_runtime.h>

#include "kernels/common/tile.h"
#include "kernels/conv/sm80/params.h"

namespace spamm::cuda {

template <class Norm>
using Convolve = cudaError_t (*)(const kernels::ConvSm80Params<Norm>& params,
                                 const kernels::Launch& how);

cudaError_t conv_sm80_f16(const kernels::ConvSm80Params<float>&, const kernels::Launch&);
cudaError_t conv_sm80_bf16(const kernels::ConvSm80Params<float>&, const kernels::Launch&);
cudaError_t conv_sm80_tf32(const kernels::ConvSm80Params<float>&, const kernels::Launch&);
cudaError_t conv_sm80_f32(const kernels::ConvSm80Params<float>&, const kernels::Launch&);
cudaError_t conv_sm80_f64(const kernels::ConvSm80Params<double>&, const kernels::Launch&);

}  // namespace spamm::cuda
