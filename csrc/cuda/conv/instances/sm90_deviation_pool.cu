// Max pooling of deviations from a reference.
#include "cuda/conv/launch_sm90.h"
#include "kernels/conv/sm90/deviation_pool.cuh"

namespace spamm::cuda {

template <class Element>
cudaError_t launch_deviation_pool(const kernels::conv::sm90::DeviationPoolParams& params,
                                  cudaStream_t stream) {
  return kernels::conv::sm90::launch_deviation_pool<Element>(params, stream);
}

template cudaError_t launch_deviation_pool<__half>(const kernels::conv::sm90::DeviationPoolParams&,
                                                   cudaStream_t);
template cudaError_t launch_deviation_pool<__nv_bfloat16>(
    const kernels::conv::sm90::DeviationPoolParams&, cudaStream_t);
template cudaError_t launch_deviation_pool<float>(const kernels::conv::sm90::DeviationPoolParams&,
                                                  cudaStream_t);

}  // namespace spamm::cuda
