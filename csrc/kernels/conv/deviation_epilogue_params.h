// The parameters of the epilogue of deviations as a pass of its own.
#pragma once

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

}  // namespace spamm::kernels
