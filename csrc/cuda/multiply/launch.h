// Launches of the multiply kernels, which are slow to compile (cuda/instances.in).
// `how.stream` is the current stream. The result is the error code of the driver or the launch.
#pragma once

#include <cuda_runtime.h>

#include "kernels/common/tile.h"
#include "kernels/multiply/params.h"
#include "kernels/norm_map/params.h"

namespace spamm::cuda {

// Over `lists` unless they are null: a block-sparse product, whose `params` have no norms.
template <class Norm>
using Multiply = cudaError_t(const kernels::MultiplyParams<Norm>& params,
                             const kernels::ProductLists* lists, const kernels::Launch& how);
// The product of two operands from launch_split(). `params` says whether they are K-major. `terms`
// has room for a number for each granule of whole blocks of C.
using SplitMultiply = cudaError_t(const kernels::MultiplyParams<float>& params,
                                  const kernels::ProductLists* lists, const kernels::SplitSource& a,
                                  const kernels::SplitSource& b, int16_t* terms,
                                  const kernels::Launch& how);
// Computes C of `params` from the sums of its segments: a batch of as many times the matrices.
template <class Norm>
using Join = cudaError_t(const kernels::MultiplyParams<Norm>& params, int segments,
                         const kernels::MultiplyParams<Norm>& sums, cudaStream_t stream);
// Splits two operands into one or two split parts each, in one launch. A block has one or two
// granules (`granules`) along each edge.
using Split = cudaError_t(const kernels::SplitParams (&params)[2], int split_parts, int granules,
                          cudaStream_t stream);

Multiply<float> multiply_sm80_f16, multiply_sm80_bf16, multiply_sm80_tf32, multiply_sm80_f32;
Multiply<double> multiply_sm80_f64;

#ifdef SPAMM_WITH_SM90A
#define SPAMM_SM90
#else
#define SPAMM_SM90 [[gnu::weak]]  // null: heuristics.h does not choose them
#endif
SPAMM_SM90 Multiply<float> multiply_sm90_f16, multiply_sm90_bf16;
SPAMM_SM90 Multiply<double> multiply_sm90_f64;
SPAMM_SM90 SplitMultiply multiply_sm90_f32x1, multiply_sm90_f32x3;
SPAMM_SM90 Join<float> join_f16, join_bf16, join_f32;
SPAMM_SM90 Join<double> join_f64;
SPAMM_SM90 Split launch_split;
#undef SPAMM_SM90

}  // namespace spamm::cuda
