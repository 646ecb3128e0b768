// Concatenation of deviations along their channels, with norms of pixels: what a device can
// implement.
#pragma once

#include <ATen/core/Tensor.h>

#include "conv/backend.h"

namespace spamm {

// Of images (N, C, H, W) of one size and type. The result is channels-last and has pixel_norms().
struct JoinBackend {
  bool (*supports)(at::TensorList parts);
  ConvolutionResult (*run)(at::TensorList parts);
};

// Refuses what cannot be concatenated.
void check_parts(at::TensorList parts);

}  // namespace spamm
