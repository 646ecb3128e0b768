// The convolution of few input channels.
#include "cuda/conv/launch_sm90.h"
#include "kernels/conv/sm90/few_channels.cuh"

namespace spamm::cuda {

template <class Element>
cudaError_t launch_few_channels(const kernels::conv::sm90::FewChannelsParams& params,
                                int multiprocessors, cudaStream_t stream) {
  return kernels::conv::sm90::launch_few_channels<Element>(params, multiprocessors, stream);
}

template cudaError_t launch_few_channels<__half>(const kernels::conv::sm90::FewChannelsParams&, int,
                                                 cudaStream_t);
template cudaError_t launch_few_channels<__nv_bfloat16>(
    const kernels::conv::sm90::FewChannelsParams&, int, cudaStream_t);

}  // namespace spamm::cuda
