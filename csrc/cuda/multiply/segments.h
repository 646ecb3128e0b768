// Launches the multiply of float64 on Hopper, whose tiles may be cut into segments.
#pragma once

#include "cuda/multiply/launch.h"
#include "kernels/multiply/sm90/f64/segments.h"

namespace spamm::cuda {

#ifdef SPAMM_WITH_SM90A
cudaError_t multiply_sm90_f64(const kernels::MultiplyParams<double>&, const kernels::Launch&,
                              const kernels::SegmentMemory&);
#else  // heuristics.h does not choose it
using MultiplyInSegments = cudaError_t (*)(const kernels::MultiplyParams<double>& params,
                                           const kernels::Launch& how,
                                           const kernels::SegmentMemory& segments);
constexpr MultiplyInSegments multiply_sm90_f64 = nullptr;
#endif

}  // namespace spamm::cuda
