// float64 on Hopper's tensor cores.
#include "cuda/multiply/segments.h"
#include "cuda/tiles.h"
#include "kernels/multiply/sm90/f64/launch.cuh"

namespace spamm::cuda {

cudaError_t multiply_sm90_f64(const kernels::MultiplyParams<double>& params,
                              const kernels::Launch& how, const kernels::SegmentMemory& segments) {
  return kernels::multiply::sm90::multiply_doubles<kTilesOf<Kernel::kSm90F64>>(params, how,
                                                                               segments);
}

}  // namespace spamm::cuda
