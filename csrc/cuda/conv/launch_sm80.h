// Starts the portable convolution: one file for each type, because each is slow to compile.
// `stream` is the current one.
#pragma once

#include <cuda_runtime.h>

#include "kernels/common/tile.h"
#include "kernels/conv/sm80/params.h"

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

}  // namespace spamm::cuda
