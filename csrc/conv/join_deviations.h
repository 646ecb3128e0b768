// Concatenation of deviations along their channels, with norms of pixels: what a device can
// implement.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "conv/backend.h"

namespace spamm {

// Images (N, C, H, W) of one size. Those in phases are (N, 4 C, H / 2, W / 2): the four pixels that
// upsampling by 2 makes of one, row by row, are neighbouring channels.
struct JoinedPart {
  at::Tensor images;
  bool in_phases;

  int64_t channels() const { return images.size(1) / (in_phases ? 4 : 1); }
  Size2 size() const {
    const int64_t factor = in_phases ? 2 : 1;
    return {images.size(2) * factor, images.size(3) * factor};
  }
};

// The result is channels-last and has pixel_norms().
struct JoinBackend {
  bool (*supports)(const std::vector<JoinedPart>& parts);
  ConvolutionResult (*run)(const std::vector<JoinedPart>& parts);
};

}  // namespace spamm
