// Starts the multiply kernels: one function a file, because each is slow to compile.
#pragma once

#include <cuda_runtime.h>

#include "heuristics.h"
#include "kernels/multiply_params.h"

namespace spamm::cuda {

template <class Norm>
using MultiplyLauncher = void (*)(const kernels::MultiplyParams<Norm>& params, Tile tile,
                                  int multiprocessors, cudaStream_t stream);

void multiply_f16(const kernels::MultiplyParams<float>& params, Tile tile, int multiprocessors,
                  cudaStream_t stream);
void multiply_bf16(const kernels::MultiplyParams<float>& params, Tile tile, int multiprocessors,
                   cudaStream_t stream);
void multiply_tf32(const kernels::MultiplyParams<float>& params, Tile tile, int multiprocessors,
                   cudaStream_t stream);
void multiply_f32(const kernels::MultiplyParams<float>& params, Tile tile, int multiprocessors,
                  cudaStream_t stream);
void multiply_f64(const kernels::MultiplyParams<double>& params, Tile tile, int multiprocessors,
                  cudaStream_t stream);

}  // namespace spamm::cuda
