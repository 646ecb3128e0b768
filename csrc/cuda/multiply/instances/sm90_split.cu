// Splits float32 operands into split parts, and finds the largest terms of their product.
#include "cuda/multiply/launch.h"
#include "kernels/norm_map/largest_terms.cuh"
#include "kernels/norm_map/split.cuh"

namespace spamm::cuda {

cudaError_t launch_split(const kernels::SplitParams* params, int count, int split_parts,
                         cudaStream_t stream) {
  return kernels::launch_split(params, count, split_parts, stream);
}

cudaError_t launch_largest_terms(const kernels::LargestTermsParams& params, int64_t batch,
                                 cudaStream_t stream) {
  return kernels::launch_largest_terms(params, batch, stream);
}

}  // namespace spamm::cuda
