// Starts the multiply kernels: one function a file, because each is slow to compile. `stream` is
// the current one.
#pragma once

#include <cuda_runtime.h>

#include "kernels/common/tile.h"
#include "kernels/multiply/params.h"
#include "kernels/norm_map/split_params.h"

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

// The product of two operands that launch_split has split, k_major as in `params`.
using SplitMultiplyLauncher = void (*)(const kernels::MultiplyParams<float>& params,
                                       const kernels::SplitSource& a, const kernels::SplitSource& b,
                                       Tile tile, int multiprocessors, cudaStream_t stream);
// Splits `count` operands, one or two, into one or two split parts each, in one launch.
using SplitLauncher = void (*)(const kernels::SplitParams* params, int count, int split_parts,
                               cudaStream_t stream);

#ifdef SPAMM_WITH_SM90A
void multiply_sm90_f16(const kernels::MultiplyParams<float>& params, Tile tile, int multiprocessors,
                       cudaStream_t stream);
void multiply_sm90_bf16(const kernels::MultiplyParams<float>& params, Tile tile,
                        int multiprocessors, cudaStream_t stream);
void multiply_sm90_f32x1(const kernels::MultiplyParams<float>& params,
                         const kernels::SplitSource& a, const kernels::SplitSource& b, Tile tile,
                         int multiprocessors, cudaStream_t stream);
void multiply_sm90_f32x3(const kernels::MultiplyParams<float>& params,
                         const kernels::SplitSource& a, const kernels::SplitSource& b, Tile tile,
                         int multiprocessors, cudaStream_t stream);
void multiply_sm90_f64(const kernels::MultiplyParams<double>& params, Tile tile,
                       int multiprocessors, cudaStream_t stream);
void launch_split(const kernels::SplitParams* params, int count, int split_parts,
                  cudaStream_t stream);
#else  // heuristics.h chooses none of them
constexpr MultiplyLauncher<float> multiply_sm90_f16 = nullptr, multiply_sm90_bf16 = nullptr;
constexpr SplitMultiplyLauncher multiply_sm90_f32x1 = nullptr, multiply_sm90_f32x3 = nullptr;
constexpr MultiplyLauncher<double> multiply_sm90_f64 = nullptr;
constexpr SplitLauncher launch_split = nullptr;
#endif

}  // namespace spamm::cuda
