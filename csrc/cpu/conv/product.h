// The product of a convolution without an im2col matrix: each output pixel is the sum of the input
// pixels in its window times the weight's panels, over the valid blocks.
//
// A tile is a rectangle of the output in some images. Its rows, one for each pixel of each image,
// are multiplied together: at every step (kernel position, run of input channels), the microkernel
// takes the rows for which the step is valid, wherever they lie. A batch that does not fill a block
// of images therefore costs what its pixels cost. Each row's sum goes through K in the same order,
// whatever is valid for the others. Threads claim one tile after another.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstdint>
#include <numeric>
#include <optional>
#include <type_traits>
#include <vector>

#include "activation.h"
#include "conv/backend.h"
#include "cpu/common/convert.h"
#include "cpu/common/machine.h"
#include "cpu/conv/norms.h"
#include "cpu/conv/weight_panels.h"
#include "cpu/multiply/microkernel.h"
#include "cpu/multiply/slice_kernel.h"

namespace spamm::cpu {

// ---- Output ------------------------------------------------------------------------------------

// Calls fill(activate), for an activation that vectorises, of a sum and its channel. Always
// inlined: `fill` is to be compiled for the instructions of its caller. slopes: of leaky_relu.
template <class Sum, class Fill>
[[gnu::always_inline]] inline void with_activation(Activation activation, const Sum* slopes,
                                                   const Fill& fill) {
  // NaN stays NaN in all of them.
  const auto at_least_0 = [](Sum x, int64_t) { return x < 0 ? Sum(0) : x; };
  const auto from_0_to_6 = [](Sum x) { return x < 0 ? Sum(0) : x > 6 ? Sum(6) : x; };
  switch (activation) {
    case Activation::kNone:
      fill([](Sum x, int64_t) { return x; });
      return;
    case Activation::kRelu:
      fill(at_least_0);
      return;
    case Activation::kRelu6:
      fill([&](Sum x, int64_t) { return from_0_to_6(x); });
      return;
    case Activation::kHardswish:
      fill([&](Sum x, int64_t) { return x * from_0_to_6(x + 3) / 6; });
      return;
    case Activation::kLeakyRelu:
      fill([=](Sum x, int64_t c) { return x < 0 ? x * slopes[c] : x; });
      return;
    case Activation::kSilu:
      break;
  }
  TORCH_INTERNAL_ASSERT(false, facts_of(activation).name, " does not vectorise");
}

// `rows` pixels of `columns` channels. Pixels of the sums are ld_sums apart, those of the residual
// ld_residual.
template <class T, class Sum>
struct PixelSums {
  const Sum* sums;
  int64_t ld_sums;
  const Sum *bias, *slopes;
  const T* residual;  // null if there is none
  int64_t ld_residual, rows, columns;
};

// `activation` is one that vectorises. Out: T or Sum.
template <class Out, class T, class Sum>
SPAMM_CPU_CLONES static void write_pixels(const PixelSums<T, Sum>& pixels, Activation activation,
                                          Out* __restrict out, int64_t ld_out) {
  const auto [sums, ld_sums, bias, slopes, residual, ld_residual, rows, columns] = pixels;
  const auto fill = [&](const auto& activate) {
    for (int64_t r = 0; r < rows; ++r) {
      const Sum* __restrict sum = sums + r * ld_sums;
      Out* __restrict to = out + r * ld_out;
      if (residual) {
        const T* __restrict add = residual + r * ld_residual;
        for (int64_t c = 0; c < columns; ++c)
          to[c] = narrow<Out>(activate(sum[c] + bias[c] + static_cast<Sum>(widen(add[c])), c));
      } else {
        for (int64_t c = 0; c < columns; ++c) to[c] = narrow<Out>(activate(sum[c] + bias[c], c));
      }
    }
  };
  with_activation<Sum>(activation, slopes, fill);
}

// Norms that decide what is valid: everything if the weight's norms are undefined.
template <class N>
struct ConvNorms {
  at::Tensor weight;            // (groups, blocks of output channels, K blocks), contiguous
  at::Tensor columns;           // (groups, K blocks, pixel blocks), contiguous: the skip norms
  const PixelNorms<N>* pixels;  // in place of `columns` for blocks of one pixel
  double tau;
};

// Bit b of masks[p] is set if norm_a[b] * (scale * norm b of pixel p) is valid, for at most
// kMaskBits blocks b. Norms of neighbouring pixels are `next` apart.
template <class N>
SPAMM_CPU_CLONES static void find_valid_pixels(const N* norm_a, int64_t blocks,
                                               const N* __restrict norms, int64_t next, N scale,
                                               N tau, int64_t pixels, uint64_t* __restrict masks) {
  if (blocks == 1) {
    for (int64_t p = 0; p < pixels; ++p) masks[p] = !(norm_a[0] * (scale * norms[p * next]) < tau);
    return;
  }
  for (int64_t p = 0; p < pixels; ++p, norms += next) {
    uint64_t mask = 0;
    for (int64_t b = 0; b < blocks; ++b)
      mask |= static_cast<uint64_t>(!(norm_a[b] * (scale * norms[b]) < tau)) << b;
    masks[p] = mask;
  }
}

// T: type of the tensors. P: type of the multiplied operands.
template <class T, class P>
class ImplicitProduct {
  using N = NormOf<T>;
  using Sum = typename Microkernel<P>::Sum;

 public:
  // The residual and `output` are channels last.
  ImplicitProduct(const Convolution& conv, const Pixels<P>& pixels, WeightPanels<T, P>& panels,
                  const ConvNorms<N>& norms, const at::Tensor& output)
      : shape_(conv.shape),
        block_(conv.block),
        edge_(conv.blocks.edge),
        count_(conv.blocks.count()),
        block_images_(std::min(edge_[0], shape_.images)),
        k_blocks_(blocks_of(shape_.group_in_channels(), block_.k)),
        out_blocks_(blocks_of(shape_.group_out_channels(), block_.m)),
        pixels_(pixels),
        panels_(panels),
        norm_a_(norms.weight.defined() ? norms.weight.template const_data_ptr<N>() : nullptr),
        norm_b_(norms.columns.defined() ? norms.columns.template const_data_ptr<N>() : nullptr),
        pixel_norms_(norms.pixels),
        tau_(static_cast<N>(norms.tau)),
        zeros_(at::zeros({Microkernel<P>::kVnni ? block_images_ : 1, kRunDepth},
                         c10::CppTypeToScalarType<P>::value)),
        bias_(of_channels(conv.bias, 0)),
        slopes_(of_channels(conv.slope.tensor, conv.slope.number)),
        activation_(conv.activation),
        residual_(conv.residual ? conv.residual->const_data_ptr<T>() : nullptr),
        output_(output.mutable_data_ptr<T>()) {
    choose_tiles();
    const bool each_panel_once = pixel_tiles() == 1;
    if (!each_panel_once) panels.pack_all();
  }

  void run() const {
    std::atomic<int64_t> next{0};
    const int64_t all = tiles();
    at::parallel_for(0, std::min<int64_t>(at::get_num_threads(), all), 1, [&](int64_t, int64_t) {
      Workspace workspace(*this);
      for (int64_t number = next++; number < all; number = next++)
        multiply_tile(tile(number), workspace);
      Microkernel<P>::release();
    });
  }

 private:
  // Rows of a tile: their sums stay in cache. Matrix instructions are so fast that finding what is
  // valid must serve more of them.
  static constexpr int64_t kMostRows = Microkernel<P>::kVnni ? 1024 : 256;
  static constexpr int64_t kImagesTogether = 4;   // share the search for valid blocks
  static constexpr int64_t kTilesPerThread = 32;  // at least, if there are enough blocks
  static constexpr int64_t kMostPanels = 2;       // of a block of output channels
  static constexpr int64_t kStep = kVectorBytes / sizeof(P);  // of the columns of our own kernel
  static constexpr int64_t kRowsOfCall = 64;  // of matrix instructions, of several positions
  // Bytes of input that a tile may read. A kernel of 1 x 1 reads it once for each block of output
  // channels, and there the panels need the rest of the cache.
  static constexpr int64_t kWindowBytes = 1280 << 10, kPointWindowBytes = 256 << 10;
  // K of one call of the microkernel, at most. float32 and float64 are summed in shorter pieces, to
  // be as accurate as torch's convolution.
  static constexpr int64_t kRunDepth = sizeof(T) == 2 ? 256 : 128;

  // Positions of a tile: output pixels, row by row.
  struct PositionList {
    int32_t positions[kMostRows];
    int64_t size = 0;
  };

  struct Tile {
    int64_t group, image_block;
    Range images;                               // of the batch
    Range block_rows, block_columns, channels;  // pixel blocks, and blocks of output channels

    // Output pixels.
    Range rows, columns;

    int64_t positions() const { return rows.size * columns.size; }
  };

  // A thread's memory for one tile.
  struct Workspace {
    explicit Workspace(const ImplicitProduct& product)
        : buffer(
              at::empty({kMostRows + 1, product.block_.m}, c10::CppTypeToScalarType<Sum>::value)),
          sums(buffer.template mutable_data_ptr<Sum>()),
          zeros(sums + kMostRows * product.block_.m),
          runs(kRunDepth / product.block_.k),
          panels(product.panels_, blocks_of(product.block_.m, product.panels_.width()),
                 product.block_.k) {
      std::fill_n(zeros, product.block_.m, Sum(0));
    }

    at::Tensor buffer;
    Sum* sums;                  // (positions, images) x a block of output channels
    Sum* zeros;                 // a row of them
    uint64_t masks[kMostRows];  // valid blocks of input channels, for each pixel block of the tile
    // For each position of the tile: the first image's pixel, or null in the padding; the valid
    // blocks of input channels that are still to be multiplied; whether it has a sum.
    const P* sources[kMostRows];
    uint64_t valid[kMostRows];
    bool started[kMostRows];
    bool finished[kMostRows];  // whether it has been written
    bool all_finished;
    std::vector<PositionList> runs;  // by the length of a run, minus one
    // For each row that is multiplied: see ListedRows.
    const P* a_rows[kMostRows];
    const Sum* before_rows[kMostRows];
    Sum* to_rows[kMostRows];
    T* output_rows[kMostRows];
    const T* residual_rows[kMostRows];
    PanelsOnDemand<T, P> panels;
  };

  // A number of each output channel, in the sums' type.
  at::Tensor of_channels(const std::optional<at::Tensor>& given, double otherwise) const {
    constexpr auto kType = c10::CppTypeToScalarType<Sum>::value;
    if (!given) return at::full({shape_.out_channels}, otherwise, kType);
    return given->to(kType).expand({shape_.out_channels}).contiguous();
  }

  // ---- Tiles -----------------------------------------------------------------------------------

  int64_t pixel_tiles() const {
    return count_[0] * blocks_of(block_images_, tile_images_) * blocks_of(count_[1], tile_rows_) *
           blocks_of(count_[2], tile_columns_);
  }

  int64_t tiles() const {
    return shape_.groups * pixel_tiles() * blocks_of(out_blocks_, tile_channels_);
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
    const auto pixels_of = [&](const Range& blocks, int dimension, int64_t all) {
      const int64_t begin = blocks.begin * edge_[dimension];
      return Range{begin, std::min(blocks.end() * edge_[dimension], all) - begin};
    };
    Tile tile;
    tile.channels = next_range(tile_channels_, out_blocks_);
    tile.block_columns = next_range(tile_columns_, count_[2]);
    tile.block_rows = next_range(tile_rows_, count_[1]);
    tile.columns = pixels_of(tile.block_columns, 2, shape_.output.width);
    tile.rows = pixels_of(tile.block_rows, 1, shape_.output.height);
    const Range images = next_range(tile_images_, block_images_);
    tile.image_block = next_index(count_[0]);
    tile.group = number;
    tile.images.begin = tile.image_block * edge_[0] + images.begin;
    // The last block of images may be smaller: some of its parts are empty.
    tile.images.size = std::clamp<int64_t>(shape_.images - tile.images.begin, 0, images.size);
    return tile;
  }

  // Tiles grow as long as they fit in cache and there are enough of them: over a few images, along
  // a row, over more rows, then over more images.
  void choose_tiles() {
    const int64_t threads = at::get_num_threads();
    const bool is_point = !Microkernel<P>::kVnni && shape_.kernel_positions() == 1;
    const int64_t most_bytes = is_point ? kPointWindowBytes : kWindowBytes;
    const auto fits = [&] {
      const int64_t rows = tile_images_ * tile_rows_ * edge_[1] * tile_columns_ * edge_[2];
      return rows <= kMostRows && window_bytes() <= most_bytes && tiles() >= 2 * threads;
    };
    const auto grow = [&](int64_t& size, int64_t most) {
      while (size < most) {
        const int64_t before = size;
        size = std::min(2 * size, most);
        if (fits()) continue;
        size = before;
        break;
      }
    };
    if (Microkernel<P>::kVnni) {
      tile_images_ = block_images_;  // whose rows matrix instructions read at once
    } else {
      grow(tile_images_, std::min(kImagesTogether, block_images_));
    }
    grow(tile_columns_, count_[2]);
    grow(tile_rows_, count_[1]);
    grow(tile_images_, block_images_);
    // All channels, if there are enough tiles: they read the same input.
    tile_channels_ = out_blocks_;
    while (tile_channels_ > 1 && tiles() < kTilesPerThread * threads)
      tile_channels_ = blocks_of(tile_channels_, 2);
  }

  int64_t window_bytes() const {
    const auto reach = [](int64_t pixels, int64_t stride, int64_t window, int64_t input) {
      return std::min((pixels - 1) * stride + window, input);
    };
    const int64_t height = reach(tile_rows_ * edge_[1], shape_.stride.height,
                                 shape_.window().height, shape_.input.height);
    const int64_t width = reach(tile_columns_ * edge_[2], shape_.stride.width,
                                shape_.window().width, shape_.input.width);
    return height * width * tile_images_ * pixels_.depth * static_cast<int64_t>(sizeof(P));
  }

  void multiply_tile(const Tile& tile, Workspace& workspace) const {
    if (tile.images.size == 0) return;
    for (int64_t j = tile.channels.begin; j < tile.channels.end(); ++j) {
      std::fill_n(workspace.started, tile.positions(), false);
      std::fill_n(workspace.finished, tile.positions(), false);
      workspace.all_finished = false;
      for (int64_t kernel_position = 0; kernel_position < shape_.kernel_positions();
           ++kernel_position) {
        const Step step{tile, j, kernel_position};
        // A kernel of 1 x 1 has the same for all output channels.
        if (shape_.kernel_positions() > 1 || j == tile.channels.begin)
          find_sources(step, workspace);
        workspace.panels.forget();
        for (int64_t first = 0; first < k_blocks_; first += kMaskBits)
          multiply_blocks(step, {first, std::min(kMaskBits, k_blocks_ - first)}, workspace);
      }
      if (!workspace.all_finished) write(tile, j, workspace);
    }
  }

  // ---- Products --------------------------------------------------------------------------------

  // A tile, a block of output channels and a kernel position.
  struct Step {
    const Tile& tile;
    int64_t j, kernel_position;
  };

  // Calls visit(position, count, row, column) for the positions of a tile that do not read padding:
  // `count` of them from `position` on read the input from there on.
  template <class Visit>
  void each_seen_run(const Step& step, const Visit& visit) const {
    const Tile& tile = step.tile;
    const auto [first, last] =
        shape_.inside(&Size2::width, step.kernel_position % shape_.kernel.width);
    const int64_t begin = std::clamp(first, tile.columns.begin, tile.columns.end());
    const int64_t end = std::clamp(last, begin, tile.columns.end());
    for (int64_t i = 0; begin < end && i < tile.rows.size; ++i) {
      const int64_t position = i * tile.columns.size + begin - tile.columns.begin;
      if (const auto seen = shape_.seen_by(tile.rows.begin + i, begin, step.kernel_position))
        visit(position, end - begin, seen->height, seen->width);
    }
  }

  void find_sources(const Step& step, Workspace& workspace) const {
    const Tile& tile = step.tile;
    const int64_t next = shape_.stride.width * pixels_.column_stride;
    std::fill_n(workspace.sources, tile.positions(), nullptr);
    each_seen_run(step, [&](int64_t position, int64_t count, int64_t row, int64_t column) {
      const P* const first = pixels_.at(tile.images.begin, row, column, tile.group);
      for (int64_t i = 0; i < count; ++i) workspace.sources[position + i] = first + i * next;
    });
  }

  // Multiplies the valid ones of at most kMaskBits blocks of input channels.
  void multiply_blocks(const Step& step, const Range& blocks, Workspace& workspace) const {
    const int64_t positions = step.tile.positions();
    const auto most = static_cast<int64_t>(workspace.runs.size());
    const uint64_t all = ~uint64_t{0} >> (kMaskBits - blocks.size);
    if (!norm_a_) {
      std::fill_n(workspace.valid, positions, all);
    } else {
      find_valid_blocks(step, blocks, workspace);
    }
    if (std::all_of(workspace.valid, workspace.valid + positions,
                    [&](uint64_t valid) { return valid == all; })) {
      for (int64_t c = 0; c < blocks.size; c += most) {
        PositionList& run = workspace.runs[0];
        std::iota(run.positions, run.positions + positions, 0);
        run.size = positions;
        multiply_run(step, {blocks.begin + c, std::min(most, blocks.size - c)}, run, workspace);
      }
      return;
    }
    for (int64_t c = 0; c < blocks.size; ++c) {
      find_runs(positions, c, workspace);
      for (int64_t size = 1; size <= most; ++size) {
        PositionList& run = workspace.runs[size - 1];
        if (run.size > 0) multiply_run(step, {blocks.begin + c, size}, run, workspace);
      }
    }
  }

  // Finds those of each position, among the given blocks.
  void find_valid_blocks(const Step& step, const Range& blocks, Workspace& workspace) const {
    const Tile& tile = step.tile;
    if (pixel_norms_) {
      look_up_valid_blocks(step, blocks, workspace);
      return;
    }
    find_masks(step, blocks, workspace.masks);
    uint64_t* valid = workspace.valid;
    for (int64_t row = tile.rows.begin; row < tile.rows.end(); ++row) {
      const uint64_t* masks =
          workspace.masks + (row / edge_[1] - tile.block_rows.begin) * tile.block_columns.size;
      for (int64_t column = tile.columns.begin; column < tile.columns.end(); ++column)
        *valid++ = masks[column / edge_[2] - tile.block_columns.begin];
    }
  }

  // The same for blocks of one pixel, from the norms of the pixels that they see.
  void look_up_valid_blocks(const Step& step, const Range& blocks, Workspace& workspace) const {
    const Tile& tile = step.tile;
    const N* const norm_a =
        norm_a_ +
        ((tile.group * out_blocks_ + step.j) * shape_.kernel_positions() + step.kernel_position) *
            k_blocks_ +
        blocks.begin;
    const int64_t images = std::min(edge_[0], shape_.images - tile.image_block * edge_[0]);
    const N scale = std::sqrt(static_cast<N>(edge_[0]) / static_cast<N>(images));
    uint64_t of_padding;
    const std::array<N, kMaskBits> zeros{};
    find_valid_pixels(norm_a, blocks.size, zeros.data(), 0, scale, tau_, 1, &of_padding);
    const int64_t next = shape_.stride.width * pixel_norms_->column_stride();
    std::fill_n(workspace.valid, tile.positions(), of_padding);
    each_seen_run(step, [&](int64_t position, int64_t count, int64_t row, int64_t column) {
      const N* const norms =
          pixel_norms_->at(tile.image_block, row, column, tile.group) + blocks.begin;
      find_valid_pixels(norm_a, blocks.size, norms, next, scale, tau_, count,
                        workspace.valid + position);
    });
  }

  // Finds those of each pixel block, among the given blocks of input channels.
  void find_masks(const Step& step, const Range& blocks, uint64_t* masks) const {
    const Tile& tile = step.tile;
    const int64_t depth = shape_.kernel_positions() * k_blocks_;
    const Norms<N> norms{norm_a_ + tile.group * out_blocks_ * depth,
                         norm_b_ + tile.group * depth * volume(count_), depth, volume(count_),
                         tau_};
    const Range k{step.kernel_position * k_blocks_ + blocks.begin, blocks.size};
    for (int64_t row = tile.block_rows.begin; row < tile.block_rows.end(); ++row) {
      const int64_t first = (tile.image_block * count_[1] + row) * count_[2];
      find_valid(norms, {step.j, 1}, k, {first + tile.block_columns.begin, tile.block_columns.size},
                 masks);
      masks += tile.block_columns.size;
    }
  }

  // Lists the positions at which a run of valid blocks starts at block `c`, and takes these blocks
  // from their masks.
  static void find_runs(int64_t positions, int64_t c, Workspace& workspace) {
    const int most = static_cast<int>(workspace.runs.size());
    for (auto& run : workspace.runs) run.size = 0;
    for (int64_t position = 0; position < positions; ++position) {
      const uint64_t left = workspace.valid[position] >> c;
      // Without branches, which would often be mispredicted.
      const int size = std::clamp(std::countr_one(left), 1, most);
      const uint64_t starts = left & 1;
      PositionList& run = workspace.runs[size - 1];
      run.positions[run.size] = static_cast<int32_t>(position);
      run.size += static_cast<int64_t>(starts);
      workspace.valid[position] &= ~(((starts << size) - starts) << c);
    }
  }

  // Adds the products of neighbouring blocks of input channels at the listed positions.
  void multiply_run(const Step& step, const Range& blocks, PositionList& run,
                    Workspace& workspace) const {
    const int64_t width = panels_.width(), channel = blocks.begin * block_.k;
    const int64_t depth = std::min(blocks.size * block_.k, pixels_.depth - channel);
    const int64_t channels = std::min(block_.m, shape_.group_out_channels() - step.j * block_.m);
    const int64_t first = step.j * block_.m / width, count = blocks_of(channels, width);
    PanelRows<P> panels[kMostPanels];
    bool finite = true;
    for (int64_t i = 0; i < count; ++i) {
      const PanelPlace place{step.tile.group, first + i, step.kernel_position};
      panels[i] = panels_.is_packed() ? panels_.rows(place, channel)
                                      : workspace.panels.rows(place, i, blocks.begin, blocks.size);
      finite &= panels[i].finite;
    }
    // Padding times finite weights is zero and need not be computed. Padding times others is NaN.
    if (finite) drop_padding(run, workspace);
    if constexpr (Microkernel<P>::kVnni) {
      for (int64_t i = 0; i < count; ++i)
        multiply_positions(step.tile, run, channel, depth, panels[i].first, i * width, workspace);
    } else {
      const int64_t rows = list_rows(step.tile, run, channel, workspace);
      const bool last =
          step.kernel_position + 1 == shape_.kernel_positions() && blocks.end() == k_blocks_;
      std::optional<Finish<P>> finish;
      if constexpr (std::is_same_v<T, P>) {
        if (last && finishes_in_kernel(channels)) finish = list_outputs(step, run, workspace);
      }
      for (int64_t i = 0; i < count; ++i) {
        const ListedRows<P> listed{workspace.a_rows,
                                   workspace.before_rows,
                                   workspace.to_rows,
                                   i * width,
                                   finish ? &*finish : nullptr,
                                   i == 0 && step.j == step.tile.channels.begin ? rows : 0};
        const int64_t columns = round_up(channels - i * width, kStep);
        gemm_rows(listed, rows, std::min(width, columns), depth, panels[i].first, width);
      }
    }
    for (int64_t i = 0; i < run.size; ++i) workspace.started[run.positions[i]] = true;
  }

  static void drop_padding(PositionList& run, const Workspace& workspace) {
    int64_t kept = 0;
    for (int64_t i = 0; i < run.size; ++i) {
      const int32_t position = run.positions[i];
      run.positions[kept] = position;
      kept += workspace.sources[position] != nullptr;
    }
    run.size = kept;
  }

  // The rows of all images at the listed positions. Returns their number.
  int64_t list_rows(const Tile& tile, const PositionList& run, int64_t channel,
                    Workspace& workspace) const {
    const int64_t images = tile.images.size, row_of_sums = images * block_.m;
    int64_t row = 0;
    for (int64_t n = 0; n < run.size; ++n) {
      const int32_t position = run.positions[n];
      const P* const source = workspace.sources[position];
      const P* const a = source ? source + channel : zeros_.template const_data_ptr<P>();
      const int64_t next = source ? pixels_.image_stride : 0;
      Sum* const sums = workspace.sums + position * row_of_sums;
      const bool started = workspace.started[position];
      for (int64_t i = 0; i < images; ++i, ++row) {
        workspace.a_rows[row] = a + i * next;
        workspace.before_rows[row] = started ? sums + i * block_.m : workspace.zeros;
        workspace.to_rows[row] = sums + i * block_.m;
      }
    }
    return row;
  }

  // Tells whether the kernel computes the epilogue of rows whose last products it adds.
  bool finishes_in_kernel(int64_t channels) const {
    return channels % kStep == 0 &&
           (activation_ == Activation::kNone || activation_ == Activation::kRelu);
  }

  // The epilogue of the listed positions, which are finished then.
  Finish<T> list_outputs(const Step& step, const PositionList& run, Workspace& workspace) const {
    const Tile& tile = step.tile;
    const int64_t channel = tile.group * shape_.group_out_channels() + step.j * block_.m;
    int64_t row = 0;
    for (int64_t n = 0; n < run.size; ++n) {
      const int32_t position = run.positions[n];
      workspace.finished[position] = true;
      const int64_t offset = output_offset(tile, position) + channel;
      for (int64_t i = 0; i < tile.images.size; ++i, ++row) {
        workspace.output_rows[row] = output_ + offset + i * next_image();
        if (residual_) workspace.residual_rows[row] = residual_ + offset + i * next_image();
      }
    }
    workspace.all_finished = run.size == tile.positions();
    return {workspace.output_rows, bias_.template const_data_ptr<T>() + channel,
            residual_ ? workspace.residual_rows : nullptr, activation_ == Activation::kRelu};
  }

  // Matrix instructions read rows at equal distances: all images of a position, and of positions
  // that follow each other in memory. Their number is a power of two, so that few kernels are
  // generated (slice_kernel.h).
  void multiply_positions(const Tile& tile, const PositionList& run, int64_t channel, int64_t depth,
                          const P* panel, int64_t column, Workspace& workspace) const {
    const int64_t images = tile.images.size, next = images * pixels_.image_stride;
    for (int64_t i = 0; i < run.size;) {
      const int32_t first = run.positions[i];
      const P* const source = workspace.sources[first];
      const bool started = workspace.started[first];
      int64_t count = 1;
      const auto follows = [&](int32_t position) {
        return source && position == first + count &&
               workspace.sources[position] == source + count * next &&
               workspace.started[position] == started;
      };
      while (i + count < run.size && (count + 1) * images <= kRowsOfCall &&
             follows(run.positions[i + count]))
        ++count;
      count = static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(count)));
      Microkernel<P>::multiply(
          count * images, panels_.width(), depth,
          source ? source + channel : zeros_.template const_data_ptr<P>(),
          source ? pixels_.image_stride : kRunDepth, /*by_columns=*/false, panel, panels_.width(),
          workspace.sums + first * images * block_.m + column, block_.m, started);
      i += count;
    }
  }

  // ---- Output ----------------------------------------------------------------------------------

  void write(const Tile& tile, int64_t j, Workspace& workspace) const {
    const int64_t row_of_sums = tile.images.size * block_.m;
    for (int64_t position = 0; position < tile.positions(); ++position)
      if (!workspace.started[position] && !workspace.finished[position])
        std::fill_n(workspace.sums + position * row_of_sums, row_of_sums, Sum(0));
    const int64_t channel = tile.group * shape_.group_out_channels() + j * block_.m;
    const int64_t channels = std::min(block_.m, shape_.group_out_channels() - j * block_.m);
    const Sum* const bias = bias_.template const_data_ptr<Sum>() + channel;
    const Sum* const slopes = slopes_.template const_data_ptr<Sum>() + channel;
    const T* const residual = residual_ ? residual_ + channel : nullptr;
    T* const output = output_ + channel;
    const auto pixels_at = [&](const PixelRun& run) {
      return PixelSums<T, Sum>{workspace.sums + run.from * block_.m,
                               run.ld_from * block_.m,
                               bias,
                               slopes,
                               residual ? residual + run.to : nullptr,
                               run.ld_to,
                               run.count,
                               channels};
    };
    if (facts_of(activation_).vectorises) {
      each_pixel_run(tile, workspace, [&](const PixelRun& run) {
        write_pixels<T>(pixels_at(run), activation_, output + run.to, run.ld_to);
      });
      return;
    }
    // ATen's functions take whole tensors.
    at::Tensor finished = at::zeros({tile.positions() * tile.images.size, block_.m},
                                    c10::CppTypeToScalarType<Sum>::value);
    Sum* const first = finished.template mutable_data_ptr<Sum>();
    each_pixel_run(tile, workspace, [&](const PixelRun& run) {
      write_pixels<Sum>(pixels_at(run), Activation::kNone, first + run.from * block_.m,
                        run.ld_from * block_.m);
    });
    apply_epilogue(finished, std::nullopt, activation_, {});
    each_pixel_run(tile, workspace, [&](const PixelRun& run) {
      write_pixels<T>(PixelSums<T, Sum>{first + run.from * block_.m, run.ld_from * block_.m,
                                        workspace.zeros, slopes, nullptr, 0, run.count, channels},
                      Activation::kNone, output + run.to, run.ld_to);
    });
  }

  int64_t next_image() const {
    return shape_.output.height * shape_.output.width * shape_.out_channels;
  }

  // The place of a position of the tile's first image in the output.
  int64_t output_offset(const Tile& tile, int64_t position) const {
    const int64_t row = tile.rows.begin + position / tile.columns.size;
    const int64_t column = tile.columns.begin + position % tile.columns.size;
    return tile.images.begin * next_image() +
           (row * shape_.output.width + column) * shape_.out_channels;
  }

  // Pixels at equal distances: their rows of sums, and their first channels in the output.
  struct PixelRun {
    int64_t from, ld_from, to, ld_to, count;
  };

  // Calls visit(run) for runs that are together the tile's pixels that are not finished.
  template <class Visit>
  void each_pixel_run(const Tile& tile, const Workspace& workspace, const Visit& visit) const {
    const int64_t columns = tile.columns.size;
    for (int64_t r = 0; r < tile.rows.size; ++r) {
      const bool* const finished = workspace.finished + r * columns;
      for (int64_t c = 0; c < columns;) {
        const int64_t begin = std::find(finished + c, finished + columns, false) - finished;
        const int64_t end = std::find(finished + begin, finished + columns, true) - finished;
        if (begin < end) visit_pixels(tile, r * columns + begin, end - begin, visit);
        c = end;
      }
    }
  }

  template <class Visit>
  void visit_pixels(const Tile& tile, int64_t position, int64_t count, const Visit& visit) const {
    const int64_t images = tile.images.size, next_pixel = shape_.out_channels;
    const int64_t from = position * images, to = output_offset(tile, position);
    if (images > count) {
      for (int64_t c = 0; c < count; ++c)
        visit(PixelRun{from + c * images, 1, to + c * next_pixel, next_image(), images});
    } else {
      for (int64_t image = 0; image < images; ++image)
        visit(PixelRun{from + image, images, to + image * next_image(), next_pixel, count});
    }
  }

  const ConvShape& shape_;
  const Block& block_;
  const Box& edge_;
  Box count_;             // of pixel blocks
  int64_t block_images_;  // of a block, or of the batch
  int64_t k_blocks_;      // blocks of input channels of a group
  int64_t out_blocks_;    // blocks of output channels of a group
  const Pixels<P>& pixels_;
  const WeightPanels<T, P>& panels_;
  const N *norm_a_, *norm_b_;         // null if everything is valid
  const PixelNorms<N>* pixel_norms_;  // in place of norm_b_
  N tau_;
  at::Tensor zeros_;          // stands in for pixels in the padding
  at::Tensor bias_, slopes_;  // of_channels()
  Activation activation_;
  const T* residual_;  // channels last; null if there is none
  T* output_;
  int64_t tile_images_ = 1, tile_rows_ = 1, tile_columns_ = 1, tile_channels_ = 1;
};

}  // namespace spamm::cpu
