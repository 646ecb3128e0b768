// Launches of the multiply kernels. Each function has its own file, because it is slow to compile.
// `how.stream` is the current stream. The result is the error code of the driver or the launch.
#pragma once

#include <cuda_runtime.h>

#include "kernels/common/tile.h"
#include "kernels/multiply/lists.h"
#include "kernels/multiply/params.h"
#include "kernels/norm_map/split_params.h"

namespace spamm::cuda {

template <class Norm>
using Multiply = cudaError_t (*)(const kernels::MultiplyParams<Norm>& params,
                                 const kernels::Launch& how);
// The product of two operands from launch_split(). `params` says whether they are K-major. `terms`
// has room for a number for each granule of whole blocks of C.
using SplitMultiply = cudaError_t (*)(const kernels::MultiplyParams<float>& params,
                                      const kernels::SplitSource& a, const kernels::SplitSource& b,
                                      int16_t* terms, const kernels::Launch& how);
// The same from the float32 matrix B, in blocks of 32 x 32 whose norms go to b.norms; null: they
// are in `params`.
using OnePassMultiply = cudaError_t (*)(const kernels::MultiplyParams<float>& params,
                                        const kernels::SplitSource& a,
                                        const kernels::NormMapParams<float>& b, int16_t* terms,
                                        const kernels::Launch& how);
// A block-sparse product: `params` has no norms.
template <class Norm>
using ListedMultiply = cudaError_t (*)(const kernels::MultiplyParams<Norm>& params,
                                       const kernels::ProductLists& lists,
                                       const kernels::Launch& how);
using ListedSplitMultiply = cudaError_t (*)(const kernels::MultiplyParams<float>& params,
                                            const kernels::ProductLists& lists,
                                            const kernels::SplitSource& a,
                                            const kernels::SplitSource& b, int16_t* terms,
                                            const kernels::Launch& how);
// Splits one or two operands (`count`) into one or two split parts each, in one launch. A block has
// one or two granules (`granules`) along each edge.
using Split = cudaError_t (*)(const kernels::SplitParams* params, int count, int split_parts,
                              int granules, cudaStream_t stream);

cudaError_t multiply_sm80_f16(const kernels::MultiplyParams<float>&, const kernels::Launch&);
cudaError_t multiply_sm80_bf16(const kernels::MultiplyParams<float>&, const kernels::Launch&);
cudaError_t multiply_sm80_tf32(const kernels::MultiplyParams<float>&, const kernels::Launch&);
cudaError_t multiply_sm80_f32(const kernels::MultiplyParams<float>&, const kernels::Launch&);
cudaError_t multiply_sm80_f64(const kernels::MultiplyParams<double>&, const kernels::Launch&);

#ifdef SPAMM_WITH_SM90A
cudaError_t multiply_sm90_f16(const kernels::MultiplyParams<float>&, const kernels::Launch&);
cudaError_t multiply_sm90_bf16(const kernels::MultiplyParams<float>&, const kernels::Launch&);
cudaError_t multiply_sm90_f32x1(const kernels::MultiplyParams<float>&, const kernels::SplitSource&,
                                const kernels::SplitSource&, int16_t*, const kernels::Launch&);
cudaError_t multiply_sm90_f32x3(const kernels::MultiplyParams<float>&, const kernels::SplitSource&,
                                const kernels::SplitSource&, int16_t*, const kernels::Launch&);
cudaError_t multiply_in_one_pass(const kernels::MultiplyParams<float>&, const kernels::SplitSource&,
                                 const kernels::NormMapParams<float>&, int16_t*,
                                 const kernels::Launch&);
cudaError_t multiply_listed_f16(const kernels::MultiplyParams<float>&, const kernels::ProductLists&,
                                const kernels::Launch&);
cudaError_t multiply_listed_bf16(const kernels::MultiplyParams<float>&,
                                 const kernels::ProductLists&, const kernels::Launch&);
cudaError_t multiply_listed_f64(const kernels::MultiplyParams<double>&,
                                const kernels::ProductLists&, const kernels::Launch&);
cudaError_t multiply_listed_f32x1(const kernels::MultiplyParams<float>&,
                                  const kernels::ProductLists&, const kernels::SplitSource&,
                                  const kernels::SplitSource&, int16_t*, const kernels::Launch&);
cudaError_t multiply_listed_f32x3(const kernels::MultiplyParams<float>&,
                                  const kernels::ProductLists&, const kernels::SplitSource&,
                                  const kernels::SplitSource&, int16_t*, const kernels::Launch&);
cudaError_t launch_split(const kernels::SplitParams*, int count, int split_parts, int granules,
                         cudaStream_t);
#else  // heuristics.h does not choose these
constexpr Multiply<float> multiply_sm90_f16 = nullptr, multiply_sm90_bf16 = nullptr;
constexpr SplitMultiply multiply_sm90_f32x1 = nullptr, multiply_sm90_f32x3 = nullptr;
constexpr OnePassMultiply multiply_in_one_pass = nullptr;
constexpr ListedMultiply<float> multiply_listed_f16 = nullptr, multiply_listed_bf16 = nullptr;
constexpr ListedMultiply<double> multiply_listed_f64 = nullptr;
constexpr ListedSplitMultiply multiply_listed_f32x1 = nullptr, multiply_listed_f32x3 = nullptr;
constexpr Split launch_split = nullptr;
#endif

}  // namespace spamm::cuda
