// Images in phases: the 2 x 2 pixels that upsampling by 2 makes of one are neighbouring channels,
// [row][column][C].
#pragma once

#include <ATen/core/Tensor.h>

namespace spamm {

// Images (N, 4 C, H, W) in phases as (N, C, 2 H, 2 W).
inline at::Tensor without_phases(const at::Tensor& x) {
  const int64_t images = x.size(0), channels = x.size(1) / 4, rows = x.size(2), columns = x.size(3);
  return x.reshape({images, 2, 2, channels, rows, columns})
      .permute({0, 3, 4, 1, 5, 2})
      .reshape({images, channels, 2 * rows, 2 * columns});
}

}  // namespace spamm
