// Norms of the im2col matrix's blocks, without the matrix. At one kernel position, a pixel block
// reads whole input pixels, whose norms are known.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "conv/backend.h"
#include "cpu/conv/by_position.h"
#include "cpu/norm_map/scaled_norm.h"

namespace spamm::cpu {

// (groups, pixel blocks, K blocks).
template <class T, class P>
at::Tensor column_norms(const Convolution& conv, const Positions<T, P>& positions) {
  using N = typename Positions<T, P>::N;
  const ConvShape& shape = conv.shape;
  const Box &grid = conv.blocks.grid, &edge = conv.blocks.edge;
  const Box count = conv.blocks.count();
  const int64_t channel_blocks = positions.channel_blocks();

  // Calls visit(norms) for each input pixel that a pixel block reads at a kernel position.
  const auto each = [&](int64_t group, const Box& block, int64_t kernel_position,
                        const auto& visit) {
    const int64_t last_row = std::min((block[1] + 1) * edge[1], grid[1]);
    const int64_t last_column = std::min((block[2] + 1) * edge[2], grid[2]);
    for (int64_t row = block[1] * edge[1]; row < last_row; ++row)
      for (int64_t column = block[2] * edge[2]; column < last_column; ++column)
        if (const auto seen = shape.seen_by(row, column, kernel_position))
          visit(positions.norms(*seen, block[0], group));
  };
  const auto write = [&](int64_t group, const Box& block, int64_t kernel_position, N* norms) {
    for (int64_t c = 0; c < channel_blocks; ++c) {
      N largest = 0;
      each(group, block, kernel_position, [&](const N* seen) {
        if (seen[c] > largest || std::isnan(seen[c])) largest = seen[c];
      });
      norms[c] = static_cast<N>(scaled_norm(largest, [&](const auto& visit) {
        each(group, block, kernel_position, [&](const N* seen) { visit(seen[c]); });
      }));
    }
  };

  const int64_t depth = shape.kernel_positions() * channel_blocks;
  const at::Tensor result =
      at::empty({shape.groups, volume(count), depth},
                conv.input.options().dtype(c10::CppTypeToScalarType<N>::value));
  N* norms = result.mutable_data_ptr<N>();
  constexpr int64_t kNormsPerTask = 1024;
  at::parallel_for(0, shape.groups * volume(count), blocks_of(kNormsPerTask, depth),
                   [&](int64_t from, int64_t to) {
                     for (int64_t task = from; task < to; ++task) {
                       const int64_t group = task / volume(count), number = task % volume(count);
                       const Box block = {number / count[2] / count[1],
                                          number / count[2] % count[1], number % count[2]};
                       for (int64_t kernel_position = 0; kernel_position < shape.kernel_positions();
                            ++kernel_position)
                         write(group, block, kernel_position,
                               norms + task * depth + kernel_position * channel_blocks);
                     }
                   });
  return result;
}

}  // namespace spamm::cpu
