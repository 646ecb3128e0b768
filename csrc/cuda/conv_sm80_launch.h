// Starts the portable convolution and the norms of its input: one file for each type, because each
// is slow to compile. `stream` is the current one.
#pragma once

#include <c10/core/ScalarType.h>
#include <cuda_runtime.h>

#include "heuristics.h"
#include "kernels/conv_sm80_params.h"

namespace spamm::cuda {

template <class Norm>
using ConvLauncher = void (*)(const kernels::ConvSm80Params<Norm>& params, Tile tile,
                              int multiprocessors, cudaStream_t stream);

void conv_f16(const kernels::ConvSm80Params<float>& params, Tile tile, int multiprocessors,
              cudaStream_t stream);
void conv_bf16(const kernels::ConvSm80Params<float>& params, Tile tile, int multiprocessors,
               cudaStream_t stream);
void conv_tf32(const kernels::ConvSm80Params<float>& params, Tile tile, int multiprocessors,
               cudaStream_t stream);
void conv_f32(const kernels::ConvSm80Params<float>& params, Tile tile, int multiprocessors,
              cudaStream_t stream);
void conv_f64(const kernels::ConvSm80Params<double>& params, Tile tile, int multiprocessors,
              cudaStream_t stream);

// `dtype` is one of those that have norms of type Norm; there are 1 to 2^31 - 1 norms.
template <class Norm>
void launch_im2col_norms(const kernels::Im2colNormsParams<Norm>& params, c10::ScalarType dtype,
                         cudaStream_t stream);

}  // namespace spamm::cuda
