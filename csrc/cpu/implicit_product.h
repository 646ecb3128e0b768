// The product of a convolution without an im2col matrix: for each output pixel of a block of
// images, the positions that its kernel window covers times the weight's panels, skipping as the
// norms say.
//
// The output is cut into tiles of neighbouring pixel blocks, so that what their windows share stays
// in a core's cache; threads take tiles one after another. In a tile, the output channels of one
// block go through all pixels before those of the next: their panels stay in cache as well.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "cpu/epilogue.h"
#include "cpu/microkernel.h"
#include "cpu/positions.h"
#include "cpu/valid_masks.h"
#include "cpu/weight_panels.h"
#include "implicit_conv.h"

namespace spamm::cpu {

// What decides which products are skipped; contiguous maps.
struct ConvNorms {
  at::Tensor weight;   // (groups, blocks of output channels, K blocks)
  at::Tensor columns;  // (groups, pixel blocks, K blocks): as they are judged
  double tau;
};

// T: type of the tensors; P: of what is multiplied.
template <class T, class P>
class ImplicitProduct {
  using N = std::conditional_t<std::is_same_v<T, double>, double, float>;
  using Sum = typename Microkernel<P>::Sum;

 public:
  ImplicitProduct(const Convolution& conv, const Positions<T, P>& positions,
                  const WeightPanels<T, P>& panels, const ConvNorms& norms,
                  const at::Tensor& output)
      : conv_(conv),
        shape_(conv.shape),
        edge_(conv.blocks.edge),
        count_(conv.blocks.count()),
        positions_(positions),
        panels_(panels),
        norms_(norms),
        tau_(static_cast<N>(norms.tau)),
        output_(output),
        row_blocks_(blocks_of(shape_.group_out_channels(), conv.block.m)),
        taps_(shape_.taps()),
        zeros_(at::zeros({edge_[0], kRunDepth}, c10::CppTypeToScalarType<P>::value)) {
    choose_tiles();
  }

  void run() const {
    const int64_t row_tiles = blocks_of(count_[1], tile_rows_);
    const int64_t column_tiles = blocks_of(count_[2], tile_columns_);
    const int64_t channel_tiles = blocks_of(row_blocks_, tile_channels_);
    std::atomic<int64_t> next{0};
    at::parallel_for(0, at::get_num_threads(), 1, [&](int64_t, int64_t) {
      Workspace workspace(edge_[0] * conv_.block.m);
      while (true) {
        int64_t number = next++;
        if (number >= tiles()) break;
        const auto take = [&](int64_t count) {
          const int64_t index = number % count;
          number /= count;
          return index;
        };
        const auto range = [&](int64_t index, int64_t size, int64_t all) {
          return Range{index * size, std::min(size, all - index * size)};
        };
        Tile tile;
        tile.channels = range(take(channel_tiles), tile_channels_, row_blocks_);
        tile.columns = range(take(column_tiles), tile_columns_, count_[2]);
        tile.rows = range(take(row_tiles), tile_rows_, count_[1]);
        tile.images = take(count_[0]);
        tile.group = number;
        multiply_tile(tile, workspace);
      }
      Microkernel<P>::release();
    });
  }

 private:
  static constexpr int64_t kWindowBytes = 768 * 1024;  // of positions that a tile reads
  static constexpr int64_t kTilesPerThread = 8;        // at least, where there are as many blocks
  static constexpr int64_t kRunDepth = 256;            // of K in one call, so that calls are alike

  // In blocks.
  struct Tile {
    int64_t group, images;
    Range rows, columns, channels;
  };

  // Valid neighbouring channel blocks at one kernel position.
  struct Run {
    int64_t tap, first, size;
  };

  struct Workspace {
    explicit Workspace(int64_t size)
        : buffer(at::empty({size}, c10::CppTypeToScalarType<Sum>::value)),
          sums(buffer.mutable_data_ptr<Sum>()) {}

    at::Tensor buffer;
    Sum* sums;  // of the images of one pixel, a block of output channels
    std::vector<Run> runs;
  };

  int64_t tiles() const {
    return shape_.groups * count_[0] * blocks_of(count_[1], tile_rows_) *
           blocks_of(count_[2], tile_columns_) * blocks_of(row_blocks_, tile_channels_);
  }

  // Tiles grow as long as what they read stays in cache, and shrink where there are too few.
  void choose_tiles() {
    const auto reach = [](int64_t pixels, int64_t stride, int64_t window, int64_t input) {
      return std::min((pixels - 1) * stride + window, input);
    };
    const auto window_bytes = [&] {
      const Size2 window = shape_.window();
      return reach(tile_rows_ * edge_[1], shape_.stride.height, window.height,
                   shape_.input.height) *
             reach(tile_columns_ * edge_[2], shape_.stride.width, window.width,
                   shape_.input.width) *
             edge_[0] * positions_.depth() * static_cast<int64_t>(sizeof(P));
    };
    const int64_t enough = kTilesPerThread * at::get_num_threads();
    tile_channels_ = row_blocks_;
    while (tile_rows_ < count_[1] || tile_columns_ < count_[2]) {
      const bool grow_columns =
          tile_rows_ == count_[1] || (tile_columns_ < count_[2] && tile_columns_ <= tile_rows_);
      int64_t& grown = grow_columns ? tile_columns_ : tile_rows_;
      const int64_t before = grown;
      grown = std::min(2 * grown, count_[grow_columns ? 2 : 1]);
      if (window_bytes() <= kWindowBytes && tiles() >= enough) continue;
      grown = before;
      break;
    }
    while (tiles() < enough && tile_channels_ > 1) tile_channels_ = blocks_of(tile_channels_, 2);
  }

  void multiply_tile(const Tile& tile, Workspace& workspace) const {
    for (int64_t j = 0; j < tile.channels.size; ++j)
      for (int64_t r = 0; r < tile.rows.size; ++r)
        for (int64_t c = 0; c < tile.columns.size; ++c)
          multiply_block(tile.group, {tile.images, tile.rows.begin + r, tile.columns.begin + c},
                         tile.channels.begin + j, workspace);
  }

  // One pixel block, for the output channels of block j.
  void multiply_block(int64_t group, const Box& block, int64_t j, Workspace& workspace) const {
    const int64_t depth = taps_ * positions_.channel_blocks();
    const int64_t number = (block[0] * count_[1] + block[1]) * count_[2] + block[2];
    const N* norm_a = norms_.weight.const_data_ptr<N>() + (group * row_blocks_ + j) * depth;
    const N* norm_b =
        norms_.columns.const_data_ptr<N>() + (group * volume(count_) + number) * depth;
    find_runs(norm_a, norm_b, workspace.runs);
    Box first, last;
    for (int d = 0; d < 3; ++d) {
      first[d] = block[d] * edge_[d];
      last[d] = std::min(first[d] + edge_[d], conv_.blocks.grid[d]);
    }
    for (int64_t row = first[1]; row < last[1]; ++row)
      for (int64_t column = first[2]; column < last[2]; ++column)
        multiply_pixel(group, block[0], last[0] - first[0], row, column, j, norm_a, workspace);
  }

  void find_runs(const N* norm_a, const N* norm_b, std::vector<Run>& runs) const {
    const int64_t blocks = positions_.channel_blocks(), most = kRunDepth / conv_.block.k;
    runs.clear();
    for (int64_t tap = 0; tap < taps_; ++tap, norm_a += blocks, norm_b += blocks) {
      int64_t size = 0;  // of the run that block c would extend
      for (int64_t c = 0; c < blocks; ++c) {
        if (norm_a[c] * norm_b[c] < tau_) {
          size = 0;
        } else if (size == 0 || size == most) {
          runs.push_back({tap, c, size = 1});
        } else {
          runs.back().size = ++size;
        }
      }
    }
  }

  // Some images of one output pixel.
  void multiply_pixel(int64_t group, int64_t image_block, int64_t images, int64_t row,
                      int64_t column, int64_t j, const N* norm_a, Workspace& workspace) const {
    const auto [m, k, n] = conv_.block;
    const int64_t width = panels_.width();
    const int64_t channels = std::min(m, shape_.group_out_channels() - j * m);
    bool started = false;
    for (const Run& run : workspace.runs) {
      const auto seen = shape_.seen_by(row, column, run.tap);
      if (!seen && all_finite(norm_a, run)) continue;
      const int64_t first = run.first * k;
      const int64_t depth = std::min(run.size * k, positions_.depth() - first);
      const P* a =
          seen ? positions_.rows(*seen, image_block, group) + first : zeros_.const_data_ptr<P>();
      const int64_t lda = seen ? positions_.row_stride() : zeros_.size(1);
      for (int64_t c = 0; c < channels; c += width) {
        Microkernel<P>::multiply(images, width, depth, a, lda,
                                 panels_.rows(group, (j * m + c) / width, run.tap, first), width,
                                 workspace.sums + c, m, started);
      }
      started = true;
    }
    write(group, image_block, images, row, column, j * m, channels,
          started ? workspace.sums : nullptr);
  }

  // Padding times finite weights is zero, and left out; times others it is NaN.
  bool all_finite(const N* norm_a, const Run& run) const {
    const N* norms = norm_a + run.tap * positions_.channel_blocks() + run.first;
    return std::all_of(norms, norms + run.size, [](N norm) { return std::isfinite(norm); });
  }

  void write(int64_t group, int64_t image_block, int64_t images, int64_t row, int64_t column,
             int64_t channel, int64_t channels, const Sum* sums) const {
    const int64_t first = group * shape_.group_out_channels() + channel;
    const auto strides = output_.strides();
    const Target<T> target{output_.mutable_data_ptr<T>() + image_block * edge_[0] * strides[0] +
                               first * strides[1] + row * strides[2] + column * strides[3],
                           strides[0], strides[1]};
    std::optional<View<T>> bias;
    if (conv_.bias) {
      const int64_t stride = conv_.bias->stride(0);
      bias = View<T>{conv_.bias->const_data_ptr<T>() + first * stride, 0, stride, images, channels};
    }
    write_rows<T, Sum>(sums, conv_.block.m, Sum(1), bias ? &*bias : nullptr, Sum(1), target, images,
                       channels);
  }

  const Convolution& conv_;
  const ConvShape& shape_;
  Box edge_, count_;
  const Positions<T, P>& positions_;
  const WeightPanels<T, P>& panels_;
  const ConvNorms& norms_;
  N tau_;
  const at::Tensor& output_;
  int64_t row_blocks_;  // of the weight matrix: blocks of output channels
  int64_t taps_;
  at::Tensor zeros_;  // what padding looks like
  int64_t tile_rows_ = 1, tile_columns_ = 1, tile_channels_ = 1;
};

}  // namespace spamm::cpu
