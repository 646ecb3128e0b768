// Pixel blocks of the output grid, and the documented rule that chooses blocks. Plain integers,
// shared by all backends.
#pragma once

#include <ATen/Dispatch.h>
#include <ATen/Functions.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <optional>

#include "checks.h"

namespace spamm {

// A count along each dimension of the output grid: images, rows, columns.
using Box = std::array<int64_t, 3>;

inline int64_t volume(const Box& box) { return box[0] * box[1] * box[2]; }

// A block holds one pixel of several images if it can: skipping then depends on the place in the
// picture, which costs the least accuracy.
//
// With a tau, a block holds n images even if the batch is smaller, so that a tau means the same for
// every batch. A searched threshold depends on the batch anyway. A block then holds no more images
// than the batch has, and the rest of n is split evenly, with columns >= rows.
inline Box default_pixel_block(bool has_tau, int64_t images, int64_t n) {
  if (has_tau) return {n, 1, 1};
  const int64_t most = std::clamp<int64_t>(images, 1, n);
  const int64_t together = std::bit_floor(static_cast<uint64_t>(most));
  const int rest = std::countr_zero(static_cast<uint64_t>(n / together));
  return {together, int64_t{1} << (rest / 2), int64_t{1} << (rest - rest / 2)};
}

inline Box check_pixel_block(at::IntArrayRef pixel_block) {
  const auto is_power_of_two = [](int64_t edge) { return edge > 0 && (edge & (edge - 1)) == 0; };
  const bool powers = pixel_block.size() == 3 &&
                      std::all_of(pixel_block.begin(), pixel_block.end(), is_power_of_two);
  // Each edge is checked against the largest n, so that the product cannot overflow.
  const bool fits = powers && *std::max_element(pixel_block.begin(), pixel_block.end()) <= 128;
  TORCH_CHECK_VALUE(
      fits && is_block_edge(pixel_block[0] * pixel_block[1] * pixel_block[2]),
      "pixel_block must be (images, rows, columns), powers of two whose product is 32, 64 or 128; "
      "got ",
      pixel_block);
  return {pixel_block[0], pixel_block[1], pixel_block[2]};
}

// The block of a convolution whose groups have `out_channels` and `in_channels` each. By default,
// small layers get small blocks, so that padding does not dominate, and n is the pixel block's
// product.
inline Block conv_block(const std::optional<DimVector>& block,
                        const std::optional<DimVector>& pixel_block, int64_t out_channels,
                        int64_t in_channels) {
  const int64_t n = pixel_block ? volume(check_pixel_block(*pixel_block)) : 64;
  if (!block) return {out_channels <= 32 ? 32 : 64, in_channels <= 32 ? 32 : 64, n};
  const Block edges = check_block(*block);
  TORCH_CHECK_VALUE(!pixel_block || edges.n == n, "pixel_block's product must be the block's n, ",
                    edges.n, "; got pixel_block ", *pixel_block, ", whose product is ", n);
  return edges;
}

// The output grid cut into pixel blocks. Blocks are in the order (image, row, column), and so are
// the pixels of a block.
struct PixelBlocks {
  Box grid;  // pixels
  Box edge;  // pixels of a block

  Box count() const {
    Box blocks;
    for (int d = 0; d < 3; ++d) blocks[d] = blocks_of(grid[d], edge[d]);
    return blocks;
  }

  bool all_full() const {
    return grid[0] % edge[0] == 0 && grid[1] % edge[1] == 0 && grid[2] % edge[2] == 0;
  }
};

// ---- Blocks that stick out of the output grid ---------------------------------------------------

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
