// A depthwise convolution that skips: a group has one channel of the input and one of the output.
// Panels (cpu/conv/product.h) would multiply the zeros that fill them. Here neighbouring channels,
// which are groups, share a vector, and each has its own skip tests.
#include <ATen/Version.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "conv/backend.h"
#include "conv/shape.h"
#include "cpu/common/convert.h"
#include "cpu/common/machine.h"
#include "cpu/common/transpose.h"
#include "cpu/conv/weight_panels.h"
#include "cpu/multiply/panels.h"
#include "cpu/multiply/slice_kernel.h"
#include "threshold.h"

namespace spamm::cpu {
namespace {

using at::Tensor;

constexpr int kPart = 16;  // channels of a part
constexpr int kHalf = kPart / 2;
constexpr int64_t kMostParts = 4;  // that are packed together

constexpr int64_t kPackedBytes = 512 << 10;  // of a thread, if it has several parts
constexpr int64_t kAhead = 8;                // pixels, that the cache is asked for

// Those that have no register are slow.
template <class N, int lanes>
using Vector [[gnu::vector_size(lanes * sizeof(N))]] = N;

template <class T, int lanes>
SPAMM_INLINE void load(const T* from, Vector<float, lanes>& x) {
  if constexpr (std::is_same_v<T, float>) {
    std::memcpy(&x, from, sizeof(x));
  } else {
    float wide[lanes];
    for (int c = 0; c < lanes; ++c) wide[c] = widen(from[c]);
    std::memcpy(&x, wide, sizeof(x));
  }
}

// A part of a row of the input as the product reads it: for each image a line of pixels of kPart
// channels, zeros in the padding and if the input has fewer. Neighbours in memory, so that they
// share no set of a cache, which pixels of several images may all do. Norms are a line before them.
struct PackedRow {
  float* norms;
  int64_t images, line;  // floats of a line

  float* image(int64_t i) const { return norms + (1 + i) * line; }
};

// Returns in `least` for each channel a number just below the least magnitude that is not zero; NaN
// if all are zero.
template <class T>
SPAMM_CPU_CLONES void pack_row(const View<T>& row, int64_t next_image, int64_t padding,
                               const PackedRow& to, float* least) {
  Vector<uint32_t, kHalf> bits = {}, smallest[] = {~bits, ~bits};
  Vector<float, kHalf> x = {};
  float wide[kPart] = {};
  for (int64_t image = 0; image < to.images; ++image) {
    float* pixel = std::fill_n(to.image(image), padding * kPart, 0.0f);
    const T* from = row.data + image * next_image;
    for (int64_t i = 0; i < row.rows; ++i, from += row.row_stride, pixel += kPart) {
      __builtin_prefetch(from + kAhead * row.row_stride);
      for (int64_t c = 0; c < row.columns && row.columns < kPart; ++c) wide[c] = widen(from[c]);
      for (int64_t half = 0; half < 2; ++half) {
        if (row.columns == kPart) {
          load<T, kHalf>(from + half * kHalf, x);
        } else {
          load<float, kHalf>(wide + half * kHalf, x);
        }
        std::memcpy(pixel + half * kHalf, &x, sizeof(x));
        std::memcpy(&bits, &x, sizeof(x));
        bits = (bits & ~(uint32_t{1} << 31)) - 1;  // of a zero, the largest
        smallest[half] = bits < smallest[half] ? bits : smallest[half];
      }
    }
    std::fill(pixel, to.image(image + 1), 0.0f);
  }
  std::memcpy(least, smallest, sizeof(smallest));
}

// The skip norms of a row's pixels. Squares are summed in float64: exact enough, and in range.
SPAMM_CPU_CLONES void find_norms(const PackedRow& row, float scale) {
  for (int64_t c = 0; c < row.line; c += kHalf) {
    if (row.images == 1) {  // the root of one square
      for (int64_t lane = c; lane < c + kHalf; ++lane)
        row.norms[lane] = std::abs(row.image(0)[lane]) * scale;
      continue;
    }
    double squares[kHalf] = {};
    for (int64_t image = 0; image < row.images; ++image) {
      const float* const pixels = row.image(image) + c;
      for (int lane = 0; lane < kHalf; ++lane)
        squares[lane] += double{pixels[lane]} * double{pixels[lane]};
    }
    for (int lane = 0; lane < kHalf; ++lane)
      row.norms[c + lane] = static_cast<float>(std::sqrt(squares[lane])) * scale;
  }
}

// One row of the output.
struct Row {
  const std::vector<PackedRow>& lines;  // by kernel row: without norms if nothing is to be added
  const float *weights, *norm_weights;  // (kernel positions, kPart)
  float tau;
  const float* bias;
  bool relu;
  int64_t columns, kernel_columns, stride, dilation, images;
  float* output;
  int64_t next_image, next_column;  // of the output
};

// Writes pixels at equal distances, from one of an image and a column on.
template <int lanes, int count>
SPAMM_INLINE void finish(const Row& row, int64_t image, int64_t column, int64_t next, int lane,
                         const Vector<float, lanes> (&sums)[count]) {
  Vector<float, lanes> bias;
  load<float, lanes>(row.bias + lane, bias);
  float* const to = row.output + image * row.next_image + column * row.next_column + lane;
#pragma GCC unroll 8
  for (int i = 0; i < count; ++i) {
    Vector<float, lanes> result = sums[i] + bias;
    if (row.relu) result = result < 0 ? Vector<float, lanes>{} : result;  // keeps NaN, as torch's
    std::memcpy(to + i * next, &result, sizeof(result));
  }
}

// Some pixels of some images. What is skipped is finite, since its norm is: times 0 it changes no
// sum.
template <int lanes, int images, int columns>
SPAMM_INLINE void convolve_pixels(const Row& row, int64_t image, int64_t column, int lane) {
  Vector<float, lanes> sums[columns][images];  // in registers, as all loops over them are unrolled
#pragma GCC unroll 8
  for (int c = 0; c < columns; ++c)
#pragma GCC unroll 8
    for (int i = 0; i < images; ++i) sums[c][i] = Vector<float, lanes>{};
  const float *weights = row.weights + lane, *norms = row.norm_weights + lane;
  for (const PackedRow& line : row.lines) {
    for (int64_t k = 0; k < row.kernel_columns; ++k, weights += kPart, norms += kPart) {
      if (!line.norms) continue;
      Vector<float, lanes> weight, norm, x;
      load<float, lanes>(weights, weight);
      load<float, lanes>(norms, norm);
#pragma GCC unroll 8
      for (int c = 0; c < columns; ++c) {
        const int64_t pixel = ((column + c) * row.stride + k * row.dilation) * kPart + lane;
        load<float, lanes>(line.norms + pixel, x);
        const Vector<float, lanes> kept = norm * x < row.tau ? Vector<float, lanes>{} : weight;
#pragma GCC unroll 8
        for (int i = 0; i < images; ++i) {
          load<float, lanes>(line.image(image + i) + pixel, x);
          sums[c][i] += kept * x;
        }
      }
    }
  }
#pragma GCC unroll 8
  for (int c = 0; c < columns; ++c)
    finish<lanes>(row, image, column + c, row.next_image, lane, sums[c]);
}

// The last columns may overlap those before them.
template <int lanes, int images>
SPAMM_INLINE void convolve_images(const Row& row, int64_t& image) {
  constexpr int kTogether = std::min(4, 8 / images);  // enough sums to hide their latency
  for (; image + images <= row.images; image += images) {
    for (int lane = 0; lane < kPart; lane += lanes) {
      if (row.columns < kTogether) {
        for (int64_t c = 0; c < row.columns; ++c)
          convolve_pixels<lanes, images, 1>(row, image, c, lane);
      } else {
        for (int64_t c = 0; c < row.columns; c += kTogether)
          convolve_pixels<lanes, images, kTogether>(row, image,
                                                    std::min(c, row.columns - kTogether), lane);
      }
    }
  }
}

// The same where nothing is skipped, of one image. A pixel of the input is loaded once for all
// columns of a kernel row.
template <int lanes, int columns, int kernel, int stride>
SPAMM_INLINE void add_pixels(const Row& row, int64_t image, int64_t column, int lane) {
  Vector<float, lanes> sums[columns], weight[kernel], x;
#pragma GCC unroll 8
  for (int c = 0; c < columns; ++c) sums[c] = Vector<float, lanes>{};
  const float* weights = row.weights + lane;
  for (const PackedRow& line : row.lines) {
#pragma GCC unroll 8
    for (int k = 0; k < kernel; ++k, weights += kPart) load<float, lanes>(weights, weight[k]);
    if (!line.norms) continue;
    const float* from = line.image(image) + column * stride * kPart + lane;
#pragma GCC unroll 32
    for (int pixel = 0; pixel < (columns - 1) * stride + kernel; ++pixel, from += kPart) {
      load<float, lanes>(from, x);
#pragma GCC unroll 8
      for (int k = 0; k < kernel; ++k) {
        const int c = pixel - k;  // times the stride
        if (c >= 0 && c % stride == 0 && c / stride < columns) sums[c / stride] += weight[k] * x;
      }
    }
  }
  finish<lanes>(row, image, column, row.next_column, lane, sums);
}

constexpr int kColumns = 7;  // divides the widths of most networks' pictures

template <int lanes, int kernel, int stride>
SPAMM_INLINE void add_row(const Row& row) {
  for (int64_t image = 0; image < row.images; ++image)
    for (int lane = 0; lane < kPart; lane += lanes)
      for (int64_t c = 0; c < row.columns; c += kColumns)
        add_pixels<lanes, kColumns, kernel, stride>(row, image, std::min(c, row.columns - kColumns),
                                                    lane);
}

// Tells whether convolve_whole_row takes rows of this shape.
bool may_be_whole(const ConvShape& shape) {
  const int64_t kernel = shape.kernel.width, stride = shape.stride.width;
  return shape.output.width >= kColumns && shape.dilation.width == 1 &&
         (kernel == 3 || kernel == 5 || (kernel == 7 && stride == 1)) && stride <= 2;
}

template <int lanes>
SPAMM_CPU_CLONES void convolve_whole_row(const Row& row) {
  if (row.kernel_columns == 7) return add_row<lanes, 7, 1>(row);
  if (row.kernel_columns == 5)
    return row.stride == 1 ? add_row<lanes, 5, 1>(row) : add_row<lanes, 5, 2>(row);
  return row.stride == 1 ? add_row<lanes, 3, 1>(row) : add_row<lanes, 3, 2>(row);
}

template <int lanes>
SPAMM_CPU_CLONES void convolve_row(const Row& row) {
  int64_t image = 0;
  convolve_images<lanes, 8>(row, image);
  convolve_images<lanes, 4>(row, image);
  convolve_images<lanes, 1>(row, image);
}

// Writes `channels` channels of a row's pixels, which `row` has as its output.
template <class T>
SPAMM_CPU_CLONES void store_row(const Row& row, int64_t channels, T* to, int64_t next_image,
                                int64_t next_column) {
  for (int64_t image = 0; image < row.images; ++image) {
    for (int64_t column = 0; column < row.columns; ++column) {
      const float* const from = row.output + image * row.next_image + column * row.next_column;
      T* const pixel = to + image * next_image + column * next_column;
      for (int64_t c = 0; c < channels; ++c) pixel[c] = narrow<T>(from[c]);
    }
  }
}

// A task is some rows of the output, in some parts of kPart channels, of the images of a block. It
// packs a row of the input when it first reads it, and finds its norms where some are too small.
template <class T>
class Depthwise {
 public:
  Depthwise(const Convolution& conv, const Knob& knob)
      : shape_(conv.shape),
        edge_(conv.blocks.edge[0]),
        images_(std::min(edge_, shape_.images)),
        parts_(blocks_of(shape_.in_channels, kPart)),
        pixels_((shape_.output.width - 1) * shape_.stride.width + shape_.window().width),
        row_size_((1 + images_) * pixels_ * kPart),
        held_rows_(std::min(shape_.window().height, shape_.input.height)),
        input_(conv.input.contiguous(at::MemoryFormat::ChannelsLast)),
        weights_(by_position(conv.weight)),
        norm_weights_(by_position(conv.norm_weight ? *conv.norm_weight : conv.weight.abs())),
        least_norms_(parts_ * kPart, std::numeric_limits<float>::infinity()),
        bias_(conv.bias ? by_position(*conv.bias) : std::vector<float>(parts_ * kPart)),
        finite_(all_finite(weights_.data(), std::ssize(weights_)) &&
                all_finite(norm_weights_.data(), std::ssize(norm_weights_))),
        relu_(conv.activation == Activation::kRelu),
        tau_(static_cast<float>(host_scalar(*knob.tau))),
        output_(with_large_pages(
            at::empty(conv.output_sizes(), conv.input.options(), at::MemoryFormat::ChannelsLast))) {
    const int64_t size = shape_.kernel_positions() * kPart;
    for (int64_t i = 0; i < std::ssize(weights_); ++i) {
      float& least = least_norms_[i / size * kPart + i % kPart];
      if (weights_[i] != 0) least = std::min(least, norm_weights_[i]);
    }
  }

  Tensor run() const {
    const int64_t height = shape_.output.height, part_size = (held_rows_ + 1) * row_size_;
    const int64_t most = kPackedBytes / (part_size * static_cast<int64_t>(sizeof(float)));
    const int64_t together = std::clamp<int64_t>(most, 1, std::min(kMostParts, parts_));
    const int64_t groups = blocks_of(parts_, together);
    const int64_t sums = images_ * shape_.output.width * kPart;
    // Over the rows of all groups, so that a thread packs few rows that another one packs, too.
    at::parallel_for(0, blocks_of(shape_.images, edge_) * groups * height, shape_.kernel.height,
                     [&](int64_t from, int64_t to) {
                       const Tensor memory = at::empty({together * part_size + sums}, at::kFloat);
                       for (int64_t rows; from < to; from += rows) {
                         const int64_t part = from / height % groups * together;
                         const int64_t row = from % height;
                         rows = std::min(to - from, height - row);
                         convolve_rows(from / height / groups,
                                       {part, std::min(together, parts_ - part)}, {row, rows},
                                       memory.mutable_data_ptr<float>());
                       }
                     });
    return output_;
  }

 private:
  // A row of a part, and what is known of it.
  struct Held {
    PackedRow packed;
    int64_t row = -1;       // of the input
    bool whole = false;     // nothing of it is skipped
    bool has_norms = true;  // or needs none
  };

  // (channels, positions) to (parts, positions, kPart), with zeros.
  std::vector<float> by_position(const Tensor& x) const {
    const int64_t positions = x.numel() / shape_.in_channels;
    const Tensor source = x.to(at::kFloat).contiguous();
    std::vector<float> result(parts_ * positions * kPart);
    for (int64_t c = 0; c < shape_.in_channels; c += kPart)
      transpose(source.const_data_ptr<float>() + c * positions, positions,
                result.data() + c * positions, kPart,
                std::min<int64_t>(kPart, shape_.in_channels - c), positions);
    return result;
  }

  // The skip norms of a block of images, over their norms.
  float scale(int64_t images) const {
    return std::sqrt(static_cast<float>(edge_) / static_cast<float>(images));
  }

  void pack(int64_t block, int64_t part, int64_t y, Held& held) const {
    const int64_t channels = shape_.in_channels, first = part * kPart;
    const int64_t next_row = shape_.input.width * channels;
    const int64_t next_image = shape_.input.height * next_row;
    const int64_t padding = std::min(shape_.padding.width, pixels_);
    const View<T> row{
        input_.template const_data_ptr<T>() + block * edge_ * next_image + y * next_row + first,
        channels, 1, std::min(shape_.input.width, pixels_ - padding),
        std::min<int64_t>(kPart, channels - first)};
    float least[kPart];
    pack_row(row, next_image, padding, held.packed, least);
    bool whole = true;
    for (int c = 0; c < kPart; ++c)  // norms are no less than a magnitude
      whole &= !(least_norms_[first + c] * (least[c] * scale(held.packed.images)) < tau_);
    held = {held.packed, y, whole, false};
  }

  // `memory`: for each part a row for each held one, and one of zeros; a row of the output.
  void convolve_rows(int64_t block, Range parts, Range rows, float* memory) const {
    const auto& [height, width] = shape_.output;
    const int64_t channels = shape_.in_channels, positions = shape_.kernel_positions();
    const int64_t images = std::min(edge_, shape_.images - block * edge_);
    const int64_t rows_of_part = held_rows_ + 1;
    static const bool has_wide_registers = at::get_cpu_capability() == "AVX512";
    std::vector<Held> all(parts.size * rows_of_part);
    for (Held& held : all) {
      held.packed = {memory, images, pixels_ * kPart};
      if (!finite_) std::fill_n(memory, row_size_, 0.0f);
      memory += row_size_;
    }
    std::vector<PackedRow> lines(shape_.kernel.height);
    for (int64_t row = rows.begin; row < rows.end(); ++row) {
      for (int64_t i = 0; i < parts.size; ++i) {
        const int64_t part = parts.begin + i, first = part * kPart;
        Held* const held = all.data() + i * rows_of_part;
        bool whole = finite_ && may_be_whole(shape_);
        for (int64_t k = 0; k < shape_.kernel.height; ++k) {
          const int64_t y =
              row * shape_.stride.height - shape_.padding.height + k * shape_.dilation.height;
          const bool inside = y >= 0 && y < shape_.input.height;
          Held& seen = held[inside ? y % held_rows_ : held_rows_];
          if (inside && seen.row != y) pack(block, part, y, seen);
          lines[k] = inside || !finite_ ? seen.packed : PackedRow{};
          whole &= !inside || seen.whole;
        }
        for (int64_t r = 0; r < held_rows_ && !whole; ++r) {
          if (!held[r].has_norms) find_norms(held[r].packed, scale(images));
          held[r].has_norms = true;
        }
        Row task{lines,
                 weights_.data() + first * positions,
                 norm_weights_.data() + first * positions,
                 tau_,
                 bias_.data() + first,
                 relu_,
                 width,
                 shape_.kernel.width,
                 shape_.stride.width,
                 shape_.dilation.width,
                 images,
                 memory,
                 width * kPart,
                 kPart};
        const int64_t own = std::min<int64_t>(kPart, channels - first), next = height * width;
        T* const to = output_.template mutable_data_ptr<T>() +
                      (block * edge_ * height + row) * width * channels + first;
        if constexpr (std::is_same_v<T, float>)
          if (own == kPart)
            std::tie(task.output, task.next_image, task.next_column) =
                std::tuple(to, next * channels, channels);
        if (has_wide_registers) {
          whole ? convolve_whole_row<kPart>(task) : convolve_row<kPart>(task);
        } else {
          whole ? convolve_whole_row<kHalf>(task) : convolve_row<kHalf>(task);
        }
        if (task.output == memory) store_row(task, own, to, next * channels, channels);
      }
    }
  }

  const ConvShape& shape_;
  int64_t edge_, images_;  // images of a block, and at most of the batch
  int64_t parts_;          // kPart channels each
  int64_t pixels_;         // of a line
  int64_t row_size_;       // floats of a packed row
  int64_t held_rows_;      // of the input at a time
  Tensor input_;
  std::vector<float> weights_, norm_weights_;  // by_position()
  std::vector<float> least_norms_;             // of a channel's weights, but for those that are 0
  std::vector<float> bias_;
  bool finite_, relu_;
  float tau_;
  Tensor output_;
};

// Blocks are one pixel of several images, and tau is held: a search takes the usual path. Lines are
// packed with their padding.
bool supports(const Convolution& conv, const Knob& knob) {
  constexpr int64_t kMostPadding = 64;
  const Box& edge = conv.blocks.edge;
  return conv.shape.group_in_channels() == 1 && conv.shape.group_out_channels() == 1 &&
         conv.shape.groups > 1 && edge[1] * edge[2] == 1 && knob.tau && !skips_nothing(knob) &&
         conv.shape.padding.width <= kMostPadding && conv.input.scalar_type() != at::kDouble;
}

ConvolutionResult run(const Convolution& conv, const Knob& knob) {
  switch (conv.input.scalar_type()) {
    case at::kHalf:
      return {Depthwise<at::Half>(conv, knob).run(), Tensor()};
    case at::kBFloat16:
      return {Depthwise<at::BFloat16>(conv, knob).run(), Tensor()};
    default:
      return {Depthwise<float>(conv, knob).run(), Tensor()};
  }
}

const Backends<ConvBackend> registered(at::kCPU, Rank::kSpecial,
                                       {.convolve = {&supports, &run}, .name = "cpu-depthwise"});

}  // namespace
}  // namespace spamm::cpu
