// Norms of the im2col matrix's blocks, without the matrix. At one kernel position, a pixel block
// reads whole input pixels, whose norms are known.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>

#include "block.h"
#include "conv/backend.h"
#include "conv/shape.h"
#include "cpu/conv/pixels.h"
#include "cpu/multiply/slice_kernel.h"
#include "cpu/norm_map/strip_norms.h"

namespace spamm::cpu {

// The view that the output has of the input at one kernel position.
class Seen {
 public:
  Seen(const ConvShape& shape, int64_t kernel_position)
      : shape_(shape),
        down_(kernel_position / shape.kernel.width * shape.dilation.height - shape.padding.height),
        right_(kernel_position % shape.kernel.width * shape.dilation.width - shape.padding.width) {}

  // The input row that an output row reads; nothing if it is padding.
  std::optional<int64_t> row(int64_t output_row) const {
    const int64_t row = output_row * shape_.stride.height + down_;
    if (row < 0 || row >= shape_.input.height) return std::nullopt;
    return row;
  }

  // The output columns that do not read padding.
  Range columns() const {
    const int64_t stride = shape_.stride.width;
    const int64_t begin = right_ < 0 ? blocks_of(-right_, stride) : 0;
    const int64_t end =
        right_ < shape_.input.width ? blocks_of(shape_.input.width - right_, stride) : 0;
    return {begin, std::max<int64_t>(std::min(end, shape_.output.width) - begin, 0)};
  }

  // The input column that one of these output columns reads.
  int64_t column(int64_t output_column) const {
    return output_column * shape_.stride.width + right_;
  }

 private:
  const ConvShape& shape_;
  int64_t down_, right_;
};

// sqrt(pixels of a block / pixels inside the grid), as PartialBlockScale has it.
template <class N>
N partial_block_scale(const Box& grid, const Box& edge, const Box& block) {
  int64_t inside = 1;
  for (int d = 0; d < 3; ++d) inside *= std::min(edge[d], grid[d] - block[d] * edge[d]);
  return std::sqrt(static_cast<N>(volume(edge)) / static_cast<N>(inside));
}

enum class ColumnNorms { kPlain, kSkip };

// Writes the norms of some pixel blocks of one row of blocks.
template <class N>
class ColumnNormWriter {
 public:
  ColumnNormWriter(const Convolution& conv, const PixelNorms<N>& pixels, ColumnNorms kind)
      : shape_(conv.shape), blocks_(conv.blocks), pixels_(pixels), kind_(kind) {}

  // `norms` is the first of the row's blocks and of the kernel position's channel blocks, which are
  // `stride` apart.
  void write(int64_t group, int64_t image_block, int64_t block_row, int64_t kernel_position,
             N* norms, int64_t stride) const {
    const int64_t columns = blocks_.count()[2];
    for (int64_t c = 0; c < columns; ++c, ++norms) {
      const Box block = {image_block, block_row, c};
      const N scale = scale_of(block);
      for (int64_t b = 0; b < pixels_.channel_blocks(); ++b)
        norms[b * stride] = scale * norm(group, block, kernel_position, b);
    }
  }

 private:
  N scale_of(const Box& block) const {
    return kind_ == ColumnNorms::kSkip ? partial_block_scale<N>(blocks_.grid, blocks_.edge, block)
                                       : N(1);
  }

  N norm(int64_t group, const Box& block, int64_t kernel_position, int64_t channel_block) const {
    N largest = 0;
    each(group, block, kernel_position, [&](const N* seen) {
      const N x = seen[channel_block];
      if (x > largest || std::isnan(x)) largest = x;
    });
    if (blocks_.edge[1] * blocks_.edge[2] == 1) return largest;  // that of one pixel
    return static_cast<N>(scaled_norm(largest, [&](const auto& visit) {
      each(group, block, kernel_position, [&](const N* seen) { visit(seen[channel_block]); });
    }));
  }

  // Calls visit(norms) for each input pixel that a pixel block reads at a kernel position.
  template <class Visit>
  void each(int64_t group, const Box& block, int64_t kernel_position, const Visit& visit) const {
    const auto& [grid, edge] = blocks_;
    const int64_t last_row = std::min((block[1] + 1) * edge[1], grid[1]);
    const int64_t last_column = std::min((block[2] + 1) * edge[2], grid[2]);
    for (int64_t row = block[1] * edge[1]; row < last_row; ++row)
      for (int64_t column = block[2] * edge[2]; column < last_column; ++column)
        if (const auto seen = shape_.seen_by(row, column, kernel_position))
          visit(pixels_.at(block[0], seen->height, seen->width, group));
  }

  const ConvShape& shape_;
  const PixelBlocks& blocks_;
  const PixelNorms<N>& pixels_;
  ColumnNorms kind_;
};

// (groups, K blocks, pixel blocks): the norms, or the skip norms.
template <class N>
at::Tensor column_norms(const Convolution& conv, const PixelNorms<N>& pixels, ColumnNorms kind) {
  const ConvShape& shape = conv.shape;
  const Box count = conv.blocks.count();
  const int64_t channel_blocks = pixels.channel_blocks(), stride = volume(count);
  const at::Tensor result =
      at::empty({shape.groups, shape.kernel_positions() * channel_blocks, stride},
                c10::CppTypeToScalarType<N>::value);
  N* const norms = result.template mutable_data_ptr<N>();
  const ColumnNormWriter<N> writer(conv, pixels, kind);
  const int64_t rows = count[0] * count[1], positions = shape.kernel_positions();
  constexpr int64_t kNormsPerTask = 4096;
  at::parallel_for(0, shape.groups * positions * rows,
                   blocks_of(kNormsPerTask, std::max<int64_t>(count[2] * channel_blocks, 1)),
                   [&](int64_t from, int64_t to) {
                     for (int64_t task = from; task < to; ++task) {
                       const int64_t row = task % rows,
                                     k = task / rows;  // k: (group, kernel position)
                       writer.write(k / positions, row / count[1], row % count[1], k % positions,
                                    norms + k * channel_blocks * stride + row * count[2], stride);
                     }
                   });
  return result;
}

}  // namespace spamm::cpu
