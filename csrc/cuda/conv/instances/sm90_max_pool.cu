// Starts max pooling with norms.
#include <c10/cuda/CUDAException.h>

#include "cuda/conv/launch_sm90.h"
#include "kernels/common/launch.cuh"
#include "kernels/conv/sm90/max_pool.cuh"

namespace spamm::cuda {

template <class Element>
void launch_max_pool(const kernels::conv::MaxPoolParams& params, cudaStream_t stream) {
  using namespace kernels::conv;
  void (*const kernel)(MaxPoolParams) = max_pool<Element>;
  const PixelNormsJob& job = params.job;
  const int norms = ceil_div(job.images, 64) * job.pixels * job.groups;
  C10_CUDA_CHECK(kernels::launch(kernel, norms, kNormThreads, 0, true, stream, params));
}

template void launch_max_pool<__half>(const kernels::conv::MaxPoolParams&, cudaStream_t);
template void launch_max_pool<__nv_bfloat16>(const kernels::conv::MaxPoolParams&, cudaStream_t);

}  // namespace spamm::cuda
