// Convolution of deviations that are zero over much of their pictures. Tiles of the output whose
// input windows hold zeros alone get none of it. The windows of the others are gathered, torch's
// convolution takes them, a few at a time, and its results are scattered with the epilogue. A
// picture of which most tiles are live is convolved whole.
//
// It serves a tau that only a product of norms of zero is less than. Other backends would skip
// single blocks of a window; their products are zeros, which change no sum. For pictures of few
// channels, norms of blocks cost more than the convolution.
#include <ATen/core/LegacyTypeDispatch.h>

#include "cpu/common/machine.h"
#include "cpu/conv/pixels.h"
#include "cpu/multiply/valid_masks.h"
#include "cpu/reference/epilogue.h"
#include "reference/reference.h"
#include "threshold.h"

namespace spamm::cpu {
namespace {

using at::Tensor;

constexpr auto kChannelsLast = at::MemoryFormat::ChannelsLast;

// Pixels of the output. oneDNN is fast with few pixels in a row where output channels are many.
Size2 tile_size(const ConvShape& shape) { return {8, shape.group_out_channels() >= 64 ? 8 : 16}; }

// Of one call of torch's convolution, at most; fewer in small pictures, where part of a call would
// often be idle. Always as many for pictures of one size, so that a picture's bits do not depend on
// the others in its batch.
constexpr int64_t kMostTilesTogether = 16;

int64_t tiles_together(int64_t tiles) {
  return std::clamp<int64_t>(tiles / kMostTilesTogether, 1, kMostTilesTogether);
}

// Share of a picture's tiles from which on gathering costs more than it saves.
constexpr double kMostLive = 0.5;

template <class N>
bool skips_only_zeros(double tau) {
  const N rounded = static_cast<N>(tau);
  return rounded > 0 && rounded <= std::numeric_limits<N>::denorm_min();
}

// Beyond this, as with a large dilation, the windows of neighbouring tiles are mostly the same.
constexpr int64_t kMostWindow = 17;  // rows or columns that an output pixel reads

bool supports(const Deviation& conv, const Knob& knob) {
  if (!conv.is_whole() || !knob.tau || !knob.tau->is_cpu()) return false;
  if (conv.base && !writes_deviations(conv.activation)) return false;
  const auto [rows, columns] = conv.shape.window();
  if (std::max(rows, columns) > kMostWindow || conv.input.numel() == 0) return false;
  if (conv.blocks.edge[0] != 1) return false;
  const double tau = host_scalar(*knob.tau);
  const bool only_zeros = conv.input.scalar_type() == at::kDouble ? skips_only_zeros<double>(tau)
                                                                  : skips_only_zeros<float>(tau);
  // Infinite and NaN weights times zeros are not zeros.
  return only_zeros && at::isfinite(weight_norms(conv)).all().item<bool>();
}

struct LiveTile {
  int64_t image;
  Range rows, columns;
};

template <class T>
class LiveTiles {
  using Sum = std::conditional_t<std::is_same_v<T, double>, double, float>;

 public:
  // All of channels last.
  LiveTiles(const Convolution& conv, const Tensor& input, const std::optional<Tensor>& residual,
            const std::optional<Tensor>& base, const Tensor& output)
      : conv_(conv),
        shape_(conv.shape),
        tile_(tile_size(conv.shape)),
        window_{(tile_.height - 1) * shape_.stride.height + shape_.window().height,
                (tile_.width - 1) * shape_.stride.width + shape_.window().width},
        down_(blocks_of(shape_.output.height, tile_.height)),
        across_(blocks_of(shape_.output.width, tile_.width)),
        together_(tiles_together(down_ * across_)),
        images_(input),
        zeros_(static_cast<size_t>(shape_.out_channels), T(0)),
        input_(input.const_data_ptr<T>()),
        residual_(residual ? residual->template const_data_ptr<T>() : nullptr),
        base_(base ? base->template const_data_ptr<T>() : nullptr),
        output_(output.mutable_data_ptr<T>()) {}

  void run() {
    find_pixels();
    find_live_tiles();
    std::vector<LiveTile> tiles;
    for (int64_t image = 0; image < shape_.images; ++image) {
      std::vector<LiveTile> found = tiles_of(image);
      if (static_cast<double>(found.size()) > kMostLive * static_cast<double>(down_ * across_)) {
        convolve_whole(image);
      } else {
        write_dead_tiles(image);
        tiles.insert(tiles.end(), found.begin(), found.end());
      }
    }
    const int64_t count = static_cast<int64_t>(tiles.size());
    at::parallel_for(0, blocks_of(count, together_), 1, [&](int64_t from, int64_t to) {
      const at::AutoDispatchBelowADInplaceOrView below_autograd;
      const Tensor windows =
          at::zeros({together_, shape_.in_channels, window_.height, window_.width},
                    conv_.input.options())
              .contiguous(kChannelsLast);
      for (int64_t i = from; i < to; ++i) {
        const int64_t first = i * together_;
        convolve(tiles.data() + first, std::min(together_, count - first), windows);
      }
    });
  }

 private:
  // Which pixels of the input differ from zero.
  void find_pixels() {
    const int64_t rows = shape_.images * shape_.input.height, columns = shape_.input.width;
    pixels_ = at::empty({rows, columns}, at::kByte);
    uint8_t* const flags = pixels_.mutable_data_ptr<uint8_t>();
    constexpr int64_t kElementsPerTask = 32 << 10;
    const int64_t grain = blocks_of(kElementsPerTask, columns * shape_.in_channels);
    at::parallel_for(0, rows, grain, [&](int64_t from, int64_t to) {
      flag_nonzero(input_ + from * columns * shape_.in_channels, (to - from) * columns,
                   shape_.in_channels, flags + from * columns);
    });
  }

  SPAMM_CPU_CLONES static void flag_nonzero(const T* values, int64_t pixels, int64_t channels,
                                            uint8_t* flags) {
    for (int64_t p = 0; p < pixels; ++p, values += channels) {
      int any = 0;
      for (int64_t c = 0; c < channels; ++c) any |= widen(values[c]) != 0;
      flags[p] = static_cast<uint8_t>(any);
    }
  }

  // The input rows or columns that are seen by some of the output, as far as they exist.
  static Range seen_by(const Range& output, int64_t stride, int64_t padding, int64_t window,
                       int64_t input) {
    const int64_t begin = output.begin * stride - padding;
    const int64_t end = (output.end() - 1) * stride - padding + window;
    const int64_t first = std::clamp<int64_t>(begin, 0, input);
    return {first, std::clamp<int64_t>(end, 0, input) - first};
  }

  Range seen_rows(const LiveTile& tile) const {
    return seen_by(tile.rows, shape_.stride.height, shape_.padding.height, shape_.window().height,
                   shape_.input.height);
  }

  Range seen_columns(const LiveTile& tile) const {
    return seen_by(tile.columns, shape_.stride.width, shape_.padding.width, shape_.window().width,
                   shape_.input.width);
  }

  bool is_live(const LiveTile& tile) const {
    const uint8_t* const flags = pixels_.const_data_ptr<uint8_t>();
    const Range rows = seen_rows(tile), columns = seen_columns(tile);
    for (int64_t row = rows.begin; row < rows.end(); ++row) {
      const uint8_t* first =
          flags + (tile.image * shape_.input.height + row) * shape_.input.width + columns.begin;
      if (std::any_of(first, first + columns.size, [](uint8_t flag) { return flag != 0; }))
        return true;
    }
    return false;
  }

  LiveTile tile(int64_t image, int64_t place) const {
    return {image, span(place / across_, tile_.height, shape_.output.height),
            span(place % across_, tile_.width, shape_.output.width)};
  }

  void find_live_tiles() {
    const int64_t tiles = down_ * across_;
    live_.resize(static_cast<size_t>(shape_.images * tiles));
    at::parallel_for(0, shape_.images * tiles, 64, [&](int64_t from, int64_t to) {
      for (int64_t i = from; i < to; ++i)
        live_[static_cast<size_t>(i)] = is_live(tile(i / tiles, i % tiles));
    });
  }

  bool is_known_live(int64_t image, int64_t place) const {
    return live_[static_cast<size_t>(image * down_ * across_ + place)] != 0;
  }

  std::vector<LiveTile> tiles_of(int64_t image) const {
    std::vector<LiveTile> found;
    for (int64_t place = 0; place < down_ * across_; ++place)
      if (is_known_live(image, place)) found.push_back(tile(image, place));
    return found;
  }

  void write_dead_tiles(int64_t image) const {
    at::parallel_for(0, down_ * across_, 64, [&](int64_t from, int64_t to) {
      for (int64_t place = from; place < to; ++place)
        if (!is_known_live(image, place)) write_dead(tile(image, place));
    });
  }

  static Range span(int64_t index, int64_t size, int64_t all) {
    return {index * size, std::min(size, all - index * size)};
  }

  void write_dead(const LiveTile& tile) const {
    for (int64_t row = tile.rows.begin; row < tile.rows.end(); ++row) {
      if (residual_) {
        write_row(tile, row, zeros_.data(), 0);
      } else {
        std::fill_n(output_ + place(tile.image, row, tile.columns.begin),
                    tile.columns.size * shape_.out_channels, T(0));
      }
    }
  }

  int64_t place(int64_t image, int64_t row, int64_t column) const {
    return ((image * shape_.output.height + row) * shape_.output.width + column) *
           shape_.out_channels;
  }

  // One row of a tile, whose sums are ld_sums apart.
  void write_row(const LiveTile& tile, int64_t row, const T* sums, int64_t ld_sums) const {
    const int64_t channels = shape_.out_channels;
    const int64_t to = place(tile.image, row, tile.columns.begin);
    const PixelDeviations<T, T> pixels = {
        sums,
        ld_sums,
        base_ ? base_ + place(0, row, tile.columns.begin) : zeros_.data(),
        base_ ? channels : 0,
        residual_ ? residual_ + to : nullptr,
        channels,
        tile.columns.size,
        channels};
    write_deviations<T, T, Sum>(pixels, conv_.activation, output_ + to, channels);
  }

  void convolve(const LiveTile* tiles, int64_t count, const Tensor& windows) const {
    const int64_t size = window_.height * window_.width * shape_.in_channels;
    T* const gathered = windows.mutable_data_ptr<T>();
    for (int64_t i = 0; i < count; ++i) gather(tiles[i], gathered + i * size);
    const Tensor found = convolution(windows, {0, 0});
    const T* sums = found.const_data_ptr<T>();
    const int64_t next_row = tile_.width * shape_.out_channels;
    for (int64_t i = 0; i < count; ++i, sums += tile_.height * next_row)
      for (int64_t row = tiles[i].rows.begin; row < tiles[i].rows.end(); ++row)
        write_row(tiles[i], row, sums + (row - tiles[i].rows.begin) * next_row,
                  shape_.out_channels);
  }

  void convolve_whole(int64_t image) const {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const Tensor found = convolution(images_.narrow(0, image, 1), shape_.padding);
    const T* const sums = found.const_data_ptr<T>();
    const LiveTile whole = {image, {0, shape_.output.height}, {0, shape_.output.width}};
    const int64_t row_size = shape_.output.width * shape_.out_channels;
    at::parallel_for(0, shape_.output.height, 8, [&](int64_t from, int64_t to) {
      for (int64_t row = from; row < to; ++row)
        write_row(whole, row, sums + row * row_size, shape_.out_channels);
    });
  }

  Tensor convolution(const Tensor& images, const Size2& padding) const {
    return at::_convolution(images, conv_.weight, {}, shape_.stride.pair(), padding.pair(),
                            shape_.dilation.pair(), /*transposed=*/false, {0, 0}, shape_.groups,
                            /*benchmark=*/false, /*deterministic=*/false, /*cudnn_enabled=*/false,
                            /*allow_tf32=*/false)
        .contiguous(kChannelsLast);
  }

  // Copies a tile's window; zeros where there is no input.
  void gather(const LiveTile& tile, T* to) const {
    const Range rows = seen_rows(tile), columns = seen_columns(tile);
    const int64_t channels = shape_.in_channels, row_size = window_.width * channels;
    const int64_t first_row = tile.rows.begin * shape_.stride.height - shape_.padding.height;
    const int64_t first_column = tile.columns.begin * shape_.stride.width - shape_.padding.width;
    const int64_t before = (columns.begin - first_column) * channels;
    const int64_t inside = columns.size * channels;
    for (int64_t i = 0; i < window_.height; ++i, to += row_size) {
      const int64_t row = first_row + i;
      if (row < rows.begin || row >= rows.end() || inside == 0) {
        std::fill_n(to, row_size, T(0));
        continue;
      }
      const T* const from =
          input_ + ((tile.image * shape_.input.height + row) * shape_.input.width + columns.begin) *
                       channels;
      std::fill_n(to, before, T(0));
      std::copy_n(from, inside, to + before);
      std::fill_n(to + before + inside, row_size - before - inside, T(0));
    }
  }

  const Convolution& conv_;
  const ConvShape& shape_;
  Size2 tile_, window_;  // pixels of the output, and of the input that a whole tile sees
  int64_t down_, across_, together_;  // tiles: in a picture, and of one call
  Tensor images_;
  std::vector<T> zeros_;
  const T *input_, *residual_, *base_;  // channels last; the last two may be null
  T* output_;
  Tensor pixels_;              // a byte for each pixel of the input
  std::vector<uint8_t> live_;  // one for each tile, picture by picture
};

ConvolutionResult run(const Deviation& conv, const Knob&) {
  const auto laid_out = [](const std::optional<Tensor>& tensor) {
    return tensor ? std::optional(tensor->contiguous(kChannelsLast)) : std::nullopt;
  };
  const Tensor output =
      with_large_pages(at::empty(conv.output_sizes(), conv.input.options(), kChannelsLast));
  const Tensor input = conv.input.contiguous(kChannelsLast);
  const auto residual = laid_out(conv.residual), base = laid_out(conv.base);
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, conv.input.scalar_type(), "conv2d_deviation",
      [&] { LiveTiles<scalar_t>(conv, input, residual, base, output).run(); });
  return {output, Tensor()};
}

const Backends<ReferenceBackend> of_live_tiles(at::kCPU, Rank::kSpecial,
                                               {.convolve = {&supports, &run}});

}  // namespace
}  // namespace spamm::cpu
