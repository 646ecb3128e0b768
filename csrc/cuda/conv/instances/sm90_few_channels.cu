// Starts the convolution of few input channels.
#include <c10/cuda/CUDAException.h>

#include "cuda/conv/launch_sm90.h"
#include "kernels/common/launch.cuh"
#include "kernels/conv/sm90/few_channels.cuh"

namespace spamm::cuda {

template <class Element>
void launch_few_channels(const kernels::conv::FewChannelsParams& params, cudaStream_t stream) {
  using namespace kernels::conv;
  void (*const kernel)(FewChannelsParams) = conv_few_channels<Element>;
  const Extent& output = params.shape.output;
  const int shared_bytes = FewChannelsLayout(params.shape).entries() * sizeof(Element);
  const dim3 grid(ceil_div(output.images, kFewChannelsImages) * output.rows *
                      ceil_div(output.columns, kFewChannelsColumns),
                  ceil_div(params.shape.out_channels, 64));
  // The same for every shape, since other threads launch the kernel as well.
  C10_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                      kFewChannelsSharedBytes));
  C10_CUDA_CHECK(
      kernels::launch(kernel, grid, kFewChannelsThreads, shared_bytes, true, stream, params));
}

template void launch_few_channels<__half>(const kernels::conv::FewChannelsParams&, cudaStream_t);
template void launch_few_channels<__nv_bfloat16>(const kernels::conv::FewChannelsParams&,
                                                 cudaStream_t);

}  // namespace spamm::cuda
