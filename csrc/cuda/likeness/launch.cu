// Starts the kernel that orders images (sm_80 and newer).
#include "cuda/likeness/launch.h"
#include "kernels/likeness/likeness.cuh"

namespace spamm::cuda {

using namespace kernels::likeness;

template <class T>
cudaError_t launch_image_order(const OrderParams& params, int multiprocessors,
                               cudaStream_t stream) {
  return launch_order<T>(params, multiprocessors, stream);
}

#define SPAMM_ORDER(T) \
  template cudaError_t launch_image_order<T>(const OrderParams&, int, cudaStream_t);
SPAMM_ORDER(bool)
SPAMM_ORDER(uint8_t)
SPAMM_ORDER(int8_t)
SPAMM_ORDER(int16_t)
SPAMM_ORDER(int32_t)
SPAMM_ORDER(int64_t)
SPAMM_ORDER(__half)
SPAMM_ORDER(__nv_bfloat16)
SPAMM_ORDER(float)
SPAMM_ORDER(double)
#undef SPAMM_ORDER

}  // namespace spamm::cuda
