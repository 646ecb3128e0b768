// Starts the kernels that order images (sm_80 and newer).
#include "cuda/likeness/launch.h"
#include "kernels/likeness/likeness.cuh"

namespace spamm::cuda {

using namespace kernels::likeness;

template <class T>
cudaError_t launch_image_centres(const CentreParams& params, cudaStream_t stream) {
  return launch_centres<T>(params, stream);
}

cudaError_t launch_image_order(const OrderParams& params, cudaStream_t stream) {
  return launch_order(params, stream);
}

#define SPAMM_CENTRES(T) \
  template cudaError_t launch_image_centres<T>(const CentreParams&, cudaStream_t);
SPAMM_CENTRES(bool)
SPAMM_CENTRES(uint8_t)
SPAMM_CENTRES(int8_t)
SPAMM_CENTRES(int16_t)
SPAMM_CENTRES(int32_t)
SPAMM_CENTRES(int64_t)
SPAMM_CENTRES(__half)
SPAMM_CENTRES(__nv_bfloat16)
SPAMM_CENTRES(float)
SPAMM_CENTRES(double)
#undef SPAMM_CENTRES

}  // namespace spamm::cuda
