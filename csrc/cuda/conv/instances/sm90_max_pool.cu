// Max pooling with output norms.
#include "cuda/conv/launch_sm90.h"
#include "kernels/conv/sm90/max_pool.cuh"

namespace spamm::cuda {

template <class Element>
cudaError_t launch_max_pool(const kernels::conv::sm90::MaxPoolParams& params, cudaStream_t stream) {
  return kernels::conv::sm90::launch_max_pool<Element>(params, stream);
}

template cudaError_t launch_max_pool<__half>(const kernels::conv::sm90::MaxPoolParams&,
                                             cudaStream_t);
template cudaError_t launch_max_pool<__nv_bfloat16>(const kernels::conv::sm90::MaxPoolParams&,
                                                    cudaStream_t);

}  // namespace spamm::cuda
