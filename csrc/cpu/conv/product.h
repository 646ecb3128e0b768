// The product of a convolution without an im2col matrix: each output pixel of a block of images is
// the sum of the input pixels in its window times the weight's panels, over the valid blocks.
//
// A tile is some neighbouring pixel blocks of the output. The input pixels that their windows share
// stay in a core's cache. Within a tile, one block of output channels is computed for all pixels
// before the next, so that its panels stay in cache too. Threads claim one tile after another.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <optional>
#include <vector>

#include "conv/backend.h"
#include "cpu/conv/by_position.h"
#include "cpu/conv/weight_panels.h"
#include "cpu/multiply/epilogue.h"
#include "cpu/multiply/microkernel.h"
#include "cpu/multiply/valid_masks.h"

namespace spamm::cpu {

// Contiguous norm maps and the threshold.
struct ConvNorms {
  at::Tensor weight;   // (groups, blocks of output channels, K blocks)
  at::Tensor columns;  // (groups, pixel blocks, K blocks): the skip norms
  double tau;
};

// T: type of the tensors. P: type of the multiplied copies.
template <class T, class P>
class ImplicitProduct {
  using N = typename Positions<T, P>::N;
  using Sum = typename Microkernel<P>::Sum;

 public:
  // `output` is channels last.
  ImplicitProduct(const Convolution& conv, const Positions<T, P>& positions,
                  const WeightPanels<T, P>& panels, const ConvNorms& norms,
                  const at::Tensor& output)
      : shape_(conv.shape),
        block_(conv.block),
        blocks_(conv.blocks),
        count_(conv.blocks.count()),
        positions_(positions),
        panels_(panels),
        norm_a_(norms.weight.const_data_ptr<N>()),
        norm_b_(norms.columns.const_data_ptr<N>()),
        tau_(static_cast<N>(norms.tau)),
        zeros_(at::zeros({blocks_.edge[0], kRunDepth}, c10::CppTypeToScalarType<P>::value)),
        output_(output.mutable_data_ptr<T>()),
        channel_blocks_(blocks_of(shape_.group_out_channels(), block_.m)) {
    if (conv.bias) {
      bias_ = View<T>{conv.bias->const_data_ptr<T>(), 0, conv.bias->stride(0), shape_.images,
                      shape_.out_channels};
    }
    choose_tiles();
  }

  void run() const {
    std::atomic<int64_t> next{0};
    at::parallel_for(0, at::get_num_threads(), 1, [&](int64_t, int64_t) {
      Workspace workspace(blocks_.edge[0] * block_.m);
      for (int64_t number = next++; number < tiles(); number = next++)
        multiply_tile(tile(number), workspace);
      Microkernel<P>::release();
    });
  }

 private:
  static constexpr int64_t kWindowBytes = 768 * 1024;  // of input that a tile may read
  static constexpr int64_t kTilesPerThread = 32;       // at least, if there are enough blocks
  // K of one call of the microkernel, at most. float32 and float64 are summed in shorter pieces, to
  // be as accurate as torch's convolution.
  static constexpr int64_t kRunDepth = sizeof(T) == 2 ? 256 : 128;

  // One block of images; ranges of blocks of output rows, output columns and output channels.
  struct Tile {
    int64_t group, images;
    Range rows, columns, channels;
  };

  // A block of images and a block of output channels, computed together.
  struct Share {
    int64_t group, image_block, images, channel_block, channels;
  };

  // Valid neighbouring blocks of input channels at one kernel position.
  struct Run {
    int64_t kernel_position, first, size;
  };

  struct Workspace {
    explicit Workspace(int64_t size)
        : buffer(at::empty({size}, c10::CppTypeToScalarType<Sum>::value)),
          sums(buffer.mutable_data_ptr<Sum>()) {}

    at::Tensor buffer;
    Sum* sums;  // of one output pixel: images x a block of output channels
    std::vector<Run> runs;
  };

  // ---- Tiles -----------------------------------------------------------------------------------

  int64_t tiles() const {
    return shape_.groups * count_[0] * blocks_of(count_[1], tile_rows_) *
           blocks_of(count_[2], tile_columns_) * blocks_of(channel_blocks_, tile_channels_);
  }

  Tile tile(int64_t number) const {
    const auto next_index = [&](int64_t count) {
      const int64_t index = number % count;
      number /= count;
      return index;
    };
    const auto next_range = [&](int64_t size, int64_t all) {
      const int64_t begin = next_index(blocks_of(all, size)) * size;
      return Range{begin, std::min(size, all - begin)};
    };
    const Range channels = next_range(tile_channels_, channel_blocks_);
    const Range columns = next_range(tile_columns_, count_[2]);
    const Range rows = next_range(tile_rows_, count_[1]);
    const int64_t images = next_index(count_[0]);
    return {number, images, rows, columns, channels};
  }

  // Tiles grow as long as their input fits in cache and there are enough of them: first along a
  // row, then over more rows.
  void choose_tiles() {
    const int64_t enough = kTilesPerThread * at::get_num_threads();
    tile_channels_ = channel_blocks_;
    const auto grow = [&](int64_t& size, int64_t most) {
      while (size < most) {
        const int64_t before = size;
        size = std::min(2 * size, most);
        if (fits_in_cache() && tiles() >= enough) continue;
        size = before;
        break;
      }
    };
    grow(tile_columns_, count_[2]);
    grow(tile_rows_, count_[1]);
    while (tiles() < enough && tile_channels_ > 1) tile_channels_ = blocks_of(tile_channels_, 2);
  }

  bool fits_in_cache() const {
    const auto reach = [](int64_t pixels, int64_t stride, int64_t window, int64_t input) {
      return std::min((pixels - 1) * stride + window, input);
    };
    const int64_t images = std::min(blocks_.edge[0], shape_.images);
    const int64_t rows = blocks_.edge[1], columns = blocks_.edge[2];
    const int64_t height =
        reach(tile_rows_ * rows, shape_.stride.height, shape_.window().height, shape_.input.height);
    const int64_t width = reach(tile_columns_ * columns, shape_.stride.width, shape_.window().width,
                                shape_.input.width);
    return height * width * images * positions_.depth() * sizeof(P) <= kWindowBytes;
  }

  void multiply_tile(const Tile& tile, Workspace& workspace) const {
    const int64_t images = std::min(blocks_.edge[0], shape_.images - tile.images * blocks_.edge[0]);
    for (int64_t j = tile.channels.begin; j < tile.channels.end(); ++j) {
      const int64_t channels = std::min(block_.m, shape_.group_out_channels() - j * block_.m);
      const Share share{tile.group, tile.images, images, j, channels};
      for (int64_t r = tile.rows.begin; r < tile.rows.end(); ++r)
        for (int64_t c = tile.columns.begin; c < tile.columns.end(); ++c)
          multiply_block(share, r, c, workspace);
    }
  }

  // ---- Products --------------------------------------------------------------------------------

  // (r, c): row and column of the pixel block, in blocks.
  void multiply_block(const Share& share, int64_t r, int64_t c, Workspace& workspace) const {
    const int64_t depth = shape_.kernel_positions() * positions_.channel_blocks();
    const int64_t block = (share.image_block * count_[1] + r) * count_[2] + c;
    const N* norm_a = norm_a_ + (share.group * channel_blocks_ + share.channel_block) * depth;
    const N* norm_b = norm_b_ + (share.group * volume(count_) + block) * depth;
    find_runs(norm_a, norm_b, workspace.runs);
    const auto& [grid, edge] = blocks_;
    const int64_t last_row = std::min((r + 1) * edge[1], grid[1]);
    const int64_t last_column = std::min((c + 1) * edge[2], grid[2]);
    for (int64_t row = r * edge[1]; row < last_row; ++row)
      for (int64_t column = c * edge[2]; column < last_column; ++column) {
        const bool any = multiply_pixel(share, row, column, norm_a, workspace);
        write(share, row, column, any ? workspace.sums : nullptr);
      }
  }

  void find_runs(const N* norm_a, const N* norm_b, std::vector<Run>& runs) const {
    const int64_t blocks = positions_.channel_blocks(), most = kRunDepth / block_.k;
    runs.clear();
    for (int64_t kernel_position = 0; kernel_position < shape_.kernel_positions();
         ++kernel_position, norm_a += blocks, norm_b += blocks) {
      int64_t size = 0;  // of the run that ends before block c
      for (int64_t c = 0; c < blocks; ++c) {
        if (norm_a[c] * norm_b[c] < tau_) {
          size = 0;
        } else if (size == 0 || size == most) {
          runs.push_back({kernel_position, c, size = 1});
        } else {
          runs.back().size = ++size;
        }
      }
    }
  }

  // One output pixel of all images. Returns whether there was any valid product.
  bool multiply_pixel(const Share& share, int64_t row, int64_t column, const N* norm_a,
                      Workspace& workspace) const {
    const auto [m, k, n] = block_;
    const int64_t width = panels_.width();
    bool any = false;
    for (const Run& run : workspace.runs) {
      const auto seen = shape_.seen_by(row, column, run.kernel_position);
      if (!seen && all_finite(norm_a, run)) continue;
      const int64_t first = run.first * k;
      const int64_t depth = std::min(run.size * k, positions_.depth() - first);
      const P* a = seen ? positions_.rows(*seen, share.image_block, share.group) + first
                        : zeros_.const_data_ptr<P>();
      const int64_t lda = seen ? positions_.row_stride() : kRunDepth;
      for (int64_t c = 0; c < share.channels; c += width) {
        const P* b = panels_.rows(share.group, (share.channel_block * m + c) / width,
                                  run.kernel_position, first);
        Microkernel<P>::multiply(share.images, width, depth, a, lda, b, width, workspace.sums + c,
                                 m, any);
      }
      any = true;
    }
    return any;
  }

  // Padding times finite weights is zero and need not be computed. Padding times others is NaN.
  bool all_finite(const N* norm_a, const Run& run) const {
    const N* norms = norm_a + run.kernel_position * positions_.channel_blocks() + run.first;
    return std::all_of(norms, norms + run.size, [](N norm) { return std::isfinite(norm); });
  }

  void write(const Share& share, int64_t row, int64_t column, const Sum* sums) const {
    const int64_t channel =
        share.group * shape_.group_out_channels() + share.channel_block * block_.m;
    const int64_t pixel = row * shape_.output.width + column;
    const int64_t to_image = shape_.output.height * shape_.output.width * shape_.out_channels;
    T* out = output_ + share.image_block * blocks_.edge[0] * to_image +
             pixel * shape_.out_channels + channel;
    std::optional<View<T>> bias;
    if (bias_) {
      bias = bias_->block(0, channel, share.images, share.channels);
    }
    write_rows<T, Sum>(sums, block_.m, Sum(1), bias ? &*bias : nullptr, Sum(1), out, to_image,
                       share.images, share.channels);
  }

  const ConvShape& shape_;
  const Block& block_;
  const PixelBlocks& blocks_;
  Box count_;
  const Positions<T, P>& positions_;
  const WeightPanels<T, P>& panels_;
  const N *norm_a_, *norm_b_;
  N tau_;
  at::Tensor zeros_;  // stands in for an input pixel in the padding
  T* output_;
  int64_t channel_blocks_;       // of output channels, in a group
  std::optional<View<T>> bias_;  // images x output channels
  int64_t tile_rows_ = 1, tile_columns_ = 1, tile_channels_ = 1;
};

}  // namespace spamm::cpu
