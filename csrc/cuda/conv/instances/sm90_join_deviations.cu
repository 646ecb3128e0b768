// Concatenation of deviations from a reference.
#include "cuda/conv/launch_join_deviations.h"
#include "kernels/conv/sm90/join_deviations.cuh"

namespace spamm::cuda {

template <class Element>
cudaError_t launch_join_deviations(const kernels::conv::sm90::JoinParams& params,
                                   cudaStream_t stream) {
  return kernels::conv::sm90::launch_join_deviations<Element>(params, stream);
}

template cudaError_t launch_join_deviations<__half>(const kernels::conv::sm90::JoinParams&,
                                                    cudaStream_t);
template cudaError_t launch_join_deviations<__nv_bfloat16>(const kernels::conv::sm90::JoinParams&,
                                                           cudaStream_t);
template cudaError_t launch_join_deviations<float>(const kernels::conv::sm90::JoinParams&,
                                                   cudaStream_t);

}  // namespace spamm::cuda
