// Packs the operands of a first layer.
#include "cuda/conv/launch_sm90.h"
#include "kernels/conv/sm90/pack_rows.cuh"

namespace spamm::cuda {

cudaError_t launch_pack_rows(const kernels::conv::sm90::PackRowsParams& params,
                             cudaStream_t stream) {
  return kernels::conv::sm90::launch_pack_rows(params, stream);
}

}  // namespace spamm::cuda
