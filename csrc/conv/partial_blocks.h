// Skip norms of pixel blocks that stick out of the output grid.
#pragma once

#include <ATen/Dispatch.h>
#include <ATen/Functions.h>

#include <algorithm>
#include <cmath>
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
    const at::Tensor ratios = at::full({}, volume(blocks.edge), norm_options).div(pixels);
    scale_ = ratios.is_cpu() ? square_roots(ratios) : ratios.sqrt();
  }

  // The skip norms of consecutive blocks, of which the first is number `first`. Nothing if they
  // equal the norms.
  std::optional<at::Tensor> operator()(const at::Tensor& norms, int64_t first) const {
    if (!scale_) return std::nullopt;
    return norms.mul(scale_->narrow(0, first, norms.size(-1)));
  }

 private:
  // ATen's square root on the CPU is that of a vector library, which rounds correctly on some
  // processors only.
  static at::Tensor square_roots(const at::Tensor& x) {
    at::Tensor roots = at::empty_like(x);
    AT_DISPATCH_FLOATING_TYPES(x.scalar_type(), "square_roots", [&] {
      const auto* first = x.const_data_ptr<scalar_t>();
      std::transform(first, first + x.numel(), roots.mutable_data_ptr<scalar_t>(),
                     [](scalar_t value) { return std::sqrt(value); });
    });
    return roots;
  }

  std::optional<at::Tensor> scale_;
};

}  // namespace spamm
