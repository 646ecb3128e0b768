// The epilogue of deviations as a pass of its own.
#include "cuda/conv/launch_deviation_epilogue.h"
#include "kernels/conv/deviation_epilogue.cuh"

namespace spamm::cuda {

template <class Element>
cudaError_t launch_deviation_epilogue(const kernels::DeviationEpilogueParams& params,
                                      int multiprocessors, cudaStream_t stream) {
  return kernels::launch_deviation_epilogue<Element>(params, multiprocessors, stream);
}

template cudaError_t launch_deviation_epilogue<__half>(const kernels::DeviationEpilogueParams&, int,
                                                       cudaStream_t);
template cudaError_t launch_deviation_epilogue<__nv_bfloat16>(
    const kernels::DeviationEpilogueParams&, int, cudaStream_t);
template cudaError_t launch_deviation_epilogue<float>(const kernels::DeviationEpilogueParams&, int,
                                                      cudaStream_t);

}  // namespace spamm::cuda
