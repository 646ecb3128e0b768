// Skip norms of pixel blocks that stick out of the output grid.
#pragma once

#include <ATen/Functions.h>

#include <optional>

#include "conv/pixel_blocks.h"

namespace spamm {

// A pixel block with c of its n pixels inside the grid has the skip norm norm * sqrt(n / c).
// Without this factor, the last images of a batch would be skipped only because they are few.
class PartialBlockScale {
 public:
  // Division and square root round once each in the norms' type. c is exact in it.
  PartialBlockScale(const PixelBlocks& blocks, at::TensorOptions norm_options) {
    if (blocks.all_full()) return;
    const Box count = blocks.count();
    const auto inside = [&](int d) {
      const at::Tensor start =
          at::arange(count[d], norm_options.dtype(at::kLong)).mul(blocks.edge[d]);
      return start.neg().add(blocks.grid[d]).clamp_max(blocks.edge[d]);
    };
    const at::Tensor pixels =
        inside(0).view({-1, 1, 1}).mul(inside(1).view({-1, 1})).mul(inside(2)).flatten();
    scale_ = at::full({}, volume(blocks.edge), norm_options).div(pixels).sqrt();
  }

  // The skip norms of consecutive blocks, of which the first is number `first`. Nothing if they
  // equal the norms.
  std::optional<at::Tensor> operator()(const at::Tensor& norms, int64_t first) const {
    if (!scale_) return std::nullopt;
    return norms.mul(scale_->narrow(0, first, norms.size(-1)));
  }

 private:
  std::optional<at::Tensor> scale_;
};

}  // namespace spamm
