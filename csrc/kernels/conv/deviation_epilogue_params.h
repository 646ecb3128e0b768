// The parameters of the epilogue of deviations as a pass of its own.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "activation.h"

namespace spamm::kernels {

// Images of one layout, in chunks of 16 bytes.
struct DeviationEpilogueParams {
  void* output;
  const void* residual;  // null if there is none
  const void* base;      // one image
  int64_t chunks, image_chunks;
  Activation activation;
};

// `stream` is the current stream. The result is the launch's error code.
template <class Element>
cudaError_t launch_deviation_epilogue(DeviationEpilogueParams params, int multiprocessors,
                                      cudaStream_t stream);

}  // namespace spamm::kernels
