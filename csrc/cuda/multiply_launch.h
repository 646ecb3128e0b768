// Starts the multiply kernels: one function a file, because each is slow to compile. `stream` is
// the current one.
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

#ifdef SPAMM_WITH_SM90A
void multiply_sm90_f16(const kernels::MultiplyParams<float>& params, Tile tile, int multiprocessors,
                       cudaStream_t stream);
void multiply_sm90_bf16(const kernels::MultiplyParams<float>& params, Tile tile,
                        int multiprocessors, cudaStream_t stream);
#else  // heuristics.h chooses none of them
constexpr MultiplyLauncher<float> multiply_sm90_f16 = nullptr, multiply_sm90_bf16 = nullptr;
#endif

}  // namespace spamm::cuda
