// A depthwise convolution that skips: a group has one channel of the input and one of the output.
// Panels (cpu/conv/product.h) would multiply the zeros that fill them. Here neighbouring channels,
// which are groups, share a vector, and each has its own skip tests.
#include <cmath>
#include <cstring>

#include "conv/backend.h"
#include "conv/shape.h"
#include "cpu/common/convert.h"
#include "cpu/common/machine.h"
#include "cpu/conv/weight_panels.h"
#include "cpu/multiply/panels.h"
#include "cpu/multiply/slice_kernel.h"
#include "threshold.h"

namespace spamm::cpu {
namespace {

using at::Tensor;

constexpr int kLanes = 16;              // channels of a part
constexpr int64_t kMostParts = 4;       // of a task
constexpr int64_t kTasksPerThread = 8;  // at least, if there are enough rows

constexpr int64_t kPackedBytes = 512 << 10;  // of a task, if it has several parts
constexpr int64_t kAhead = 8;                // pixels, that the cache is asked for

using Floats [[gnu::vector_size(kLanes * sizeof(float))]] = float;
using HalfFloats [[gnu::vector_size(kLanes / 2 * sizeof(float))]] = float;
using Doubles [[gnu::vector_size(kLanes / 2 * sizeof(double))]] = double;

template <class T>
SPAMM_INLINE void load(const T* from, Floats& x) {
  if constexpr (std::is_same_v<T, float>) {
    std::memcpy(&x, from, sizeof(x));
  } else {
    float wide[kLanes];
    for (int c = 0; c < kLanes; ++c) wide[c] = widen(from[c]);
    std::memcpy(&x, wide, sizeof(x));
  }
}

// Input rows as the product reads them. For each pixel: kLanes skip norms, then for each image
// kLanes channels, zeros if the input has fewer. Neighbours in memory, so that they share no set of
// a cache, which pixels of several images may all do.
//
// Squares are summed in float64: exact enough, and in range.
template <class T>
SPAMM_CPU_CLONES void pack_row(const View<T>& row, int64_t images, int64_t next_image, float scale,
                               float* to, int64_t next) {
  for (int64_t pixel = 0; pixel < row.rows; ++pixel, to += next) {
    Doubles sums[2] = {};
    Floats x = {};
    for (int64_t image = 0; image < images; ++image) {
      const T* const from = row.data + pixel * row.row_stride + image * next_image;
      __builtin_prefetch(from + kAhead * row.row_stride);
      if (row.columns == kLanes) {
        load(from, x);
      } else {
        float wide[kLanes] = {};
        for (int64_t c = 0; c < row.columns; ++c) wide[c] = widen(from[c]);
        load(wide, x);
      }
      std::memcpy(to + (1 + image) * kLanes, &x, sizeof(x));
      HalfFloats halves[2];
      std::memcpy(halves, &x, sizeof(x));
      for (int half = 0; half < 2; ++half) {
        const auto exact = __builtin_convertvector(halves[half], Doubles);
        sums[half] += exact * exact;
      }
    }
    if (images == 1) {  // the root of one square
      x = (x < 0 ? -x : x) * scale;
      std::memcpy(to, &x, sizeof(x));
      continue;
    }
    double squares[kLanes];
    std::memcpy(squares, sums, sizeof(squares));
    for (int c = 0; c < kLanes; ++c) to[c] = static_cast<float>(std::sqrt(squares[c])) * scale;
  }
}

// One row of the output.
template <class T>
struct Row {
  const std::vector<const float*>&
      lines;                            // by kernel row: packed, or null if nothing is to be added
  const std::vector<int64_t>& places;   // in a line: by output column and kernel column
  const float *weights, *norm_weights;  // (kernel positions, kLanes)
  float tau;
  const float* bias;
  bool relu;
  int64_t columns, kernel_columns, images, channels;
  T* output;
  int64_t next_image, next_column;  // of the output
};

// Some pixels of some images. What is skipped is finite, since its norm is: times 0 it changes no
// sum.
template <int images, int columns, class T>
SPAMM_INLINE void convolve_pixels(const Row<T>& row, int64_t image, int64_t column) {
  Floats sums[columns][images];  // in registers, as all loops over them are unrolled
#pragma GCC unroll 8
  for (int c = 0; c < columns; ++c)
#pragma GCC unroll 8
    for (int i = 0; i < images; ++i) sums[c][i] = Floats{};
  const float *weights = row.weights, *norms = row.norm_weights;
  for (const float* const line : row.lines) {
    const int64_t* places = row.places.data() + column * row.kernel_columns;
    for (int64_t k = 0; k < row.kernel_columns; ++k, ++places) {
      Floats weight, norm, x;
      load(weights, weight);
      load(norms, norm);
      weights += kLanes;
      norms += kLanes;
      if (!line) continue;
#pragma GCC unroll 8
      for (int c = 0; c < columns; ++c) {
        const float* const pixel = line + places[c * row.kernel_columns];
        load(pixel, x);
        const Floats kept = norm * x < row.tau ? Floats{} : weight;
        const float* const first = pixel + (1 + image) * kLanes;
#pragma GCC unroll 8
        for (int i = 0; i < images; ++i) {
          load(first + int64_t{i} * kLanes, x);
          sums[c][i] += kept * x;
        }
      }
    }
  }
  Floats bias;
  load(row.bias, bias);
#pragma GCC unroll 8
  for (int c = 0; c < columns; ++c) {
#pragma GCC unroll 8
    for (int i = 0; i < images; ++i) {
      Floats result = sums[c][i] + bias;
      if (row.relu) result = result < 0 ? Floats{} : result;  // keeps NaN, like torch's relu
      T* const to = row.output + (image + i) * row.next_image + (column + c) * row.next_column;
      float wide[kLanes];
      std::memcpy(wide, &result, sizeof(wide));
      if (row.channels == kLanes) {
        for (int lane = 0; lane < kLanes; ++lane) to[lane] = narrow<T>(wide[lane]);
      } else {
        for (int lane = 0; lane < row.channels; ++lane) to[lane] = narrow<T>(wide[lane]);
      }
    }
  }
}

// The last columns may overlap those before them.
template <int images, class T>
SPAMM_INLINE void convolve_images(const Row<T>& row, int64_t& image) {
  constexpr int kColumns = std::min(4, 8 / images);  // enough sums to hide their latency
  for (; image + images <= row.images; image += images) {
    if (row.columns < kColumns) {
      for (int64_t c = 0; c < row.columns; ++c) convolve_pixels<images, 1>(row, image, c);
    } else {
      for (int64_t c = 0; c < row.columns; c += kColumns)
        convolve_pixels<images, kColumns>(row, image, std::min(c, row.columns - kColumns));
    }
  }
}

template <class T>
SPAMM_CPU_CLONES void convolve_row(const Row<T>& row) {
  int64_t image = 0;
  convolve_images<8>(row, image);
  convolve_images<4>(row, image);
  convolve_images<1>(row, image);
}

// A task is some rows of the output, in some parts of kLanes channels, of the images of a block. It
// packs a row of the input, with its norms, when it first reads it.
template <class T>
class Depthwise {
 public:
  Depthwise(const Convolution& conv, const Knob& knob)
      : shape_(conv.shape),
        edge_(conv.blocks.edge[0]),
        images_(std::min(edge_, shape_.images)),
        parts_(blocks_of(shape_.in_channels, kLanes)),
        pixel_((1 + images_) * kLanes),
        line_((shape_.input.width + 1) * pixel_),
        held_rows_(std::min(shape_.window().height, shape_.input.height)),
        input_(conv.input.contiguous(at::MemoryFormat::ChannelsLast)),
        weights_(by_position(conv.weight)),
        norm_weights_(by_position(conv.norm_weight ? *conv.norm_weight : conv.weight.abs())),
        bias_(conv.bias ? by_position(*conv.bias) : std::vector<float>(parts_ * kLanes)),
        finite_(all_finite(weights_.data(), std::ssize(weights_)) &&
                all_finite(norm_weights_.data(), std::ssize(norm_weights_))),
        relu_(conv.activation == Activation::kRelu),
        tau_(static_cast<float>(host_scalar(*knob.tau))),
        output_(with_large_pages(
            at::empty(conv.output_sizes(), conv.input.options(), at::MemoryFormat::ChannelsLast))) {
    for (int64_t column = 0; column < shape_.output.width; ++column) {
      for (int64_t position = 0; position < shape_.kernel.width; ++position) {
        const int64_t x =
            column * shape_.stride.width - shape_.padding.width + position * shape_.dilation.width;
        const bool inside = x >= 0 && x < shape_.input.width;
        places_.push_back((inside ? x : shape_.input.width) * pixel_);
      }
    }
  }

  Tensor run() const {
    const int64_t blocks = blocks_of(shape_.images, edge_), height = shape_.output.height;
    const int64_t lines = held_rows_ + 1;
    const int64_t most = kPackedBytes / (lines * line_ * static_cast<int64_t>(sizeof(float)));
    const int64_t together = std::clamp<int64_t>(most, 1, std::min(kMostParts, parts_));
    const int64_t groups = blocks_of(parts_, together);
    const int64_t rows =
        blocks_of(height, blocks_of(kTasksPerThread * at::get_num_threads(), groups * blocks));
    const int64_t bands = blocks_of(height, rows);
    at::parallel_for(0, bands * groups * blocks, 1, [&](int64_t from, int64_t to) {
      const Tensor memory = at::empty({together * lines * line_}, at::kFloat);
      for (int64_t task = from; task < to; ++task) {
        const int64_t part = task % groups * together, row = task / groups % bands * rows;
        convolve_rows(task / groups / bands, {part, std::min(together, parts_ - part)},
                      {row, std::min(rows, height - row)}, memory.mutable_data_ptr<float>());
      }
    });
    return output_;
  }

 private:
  // (channels, positions) to (parts, positions, kLanes), with zeros.
  std::vector<float> by_position(const Tensor& x) const {
    const int64_t positions = x.numel() / shape_.in_channels;
    const Tensor source = x.to(at::kFloat).contiguous();
    const float* const from = source.const_data_ptr<float>();
    std::vector<float> result(parts_ * positions * kLanes);
    for (int64_t c = 0; c < shape_.in_channels; ++c)
      for (int64_t position = 0; position < positions; ++position)
        result[(c / kLanes * positions + position) * kLanes + c % kLanes] =
            from[c * positions + position];
    return result;
  }

  // `memory`: for each part a line for each held row, and one of zeros.
  void convolve_rows(int64_t block, Range parts, Range rows, float* memory) const {
    const auto [height, width] = shape_.input;
    const auto& [out_height, out_width] = shape_.output;
    const int64_t channels = shape_.in_channels, positions = shape_.kernel_positions();
    const int64_t images = std::min(edge_, shape_.images - block * edge_);
    const float scale = std::sqrt(static_cast<float>(edge_) / static_cast<float>(images));
    const int64_t window = held_rows_, size = (window + 1) * line_;
    const T* const input = input_.template const_data_ptr<T>();
    T* const output = output_.template mutable_data_ptr<T>();
    for (int64_t i = 0; i < parts.size * (window + 1); ++i) {
      const int64_t first = i % (window + 1) < window ? width * pixel_ : 0;
      std::fill_n(memory + i * line_ + first, line_ - first, 0.0f);
    }
    std::vector<int64_t> held(window, -1);  // the rows of the input that the lines hold
    std::vector<const float*> lines(shape_.kernel.height);
    for (int64_t row = rows.begin; row < rows.end(); ++row) {
      const auto seen = [&](int64_t k) {
        return row * shape_.stride.height - shape_.padding.height + k * shape_.dilation.height;
      };
      for (int64_t k = 0; k < shape_.kernel.height; ++k) {
        const int64_t y = seen(k);
        if (y < 0 || y >= height || held[y % window] == y) continue;
        held[y % window] = y;
        for (int64_t i = 0; i < parts.size; ++i) {
          const int64_t first = (parts.begin + i) * kLanes;
          const T* const pixels = input + (block * edge_ * height + y) * width * channels + first;
          pack_row(View<T>{pixels, channels, 1, width, std::min<int64_t>(kLanes, channels - first)},
                   images, height * width * channels, scale, memory + i * size + y % window * line_,
                   pixel_);
        }
      }
      for (int64_t i = 0; i < parts.size; ++i) {
        const int64_t part = parts.begin + i, first = part * kLanes;
        for (int64_t k = 0; k < shape_.kernel.height; ++k) {
          const int64_t y = seen(k);
          const bool inside = y >= 0 && y < height;
          lines[k] = inside || !finite_ ? memory + i * size + (inside ? y % window : window) * line_
                                        : nullptr;
        }
        convolve_row(Row<T>{
            lines, places_, weights_.data() + part * positions * kLanes,
            norm_weights_.data() + part * positions * kLanes, tau_, bias_.data() + first, relu_,
            out_width, shape_.kernel.width, images, std::min<int64_t>(kLanes, channels - first),
            output + (block * edge_ * out_height + row) * out_width * channels + first,
            out_height * out_width * channels, channels});
      }
    }
  }

  const ConvShape& shape_;
  int64_t edge_, images_;  // images of a block, and at most of the batch
  int64_t parts_;          // kLanes channels each
  int64_t pixel_, line_;   // floats of a packed pixel, and of a line with a pixel of padding
  int64_t held_rows_;      // of the input at a time
  Tensor input_;
  std::vector<float> weights_, norm_weights_, bias_;  // by_position()
  bool finite_, relu_;
  float tau_;
  Tensor output_;
  std::vector<int64_t> places_;  // in a line, of what an output column reads
};

// Blocks are one pixel of several images, and tau is held: a search takes the usual path.
bool supports(const Convolution& conv, const Knob& knob) {
  const Box& edge = conv.blocks.edge;
  return conv.shape.group_in_channels() == 1 && conv.shape.group_out_channels() == 1 &&
         conv.shape.groups > 1 && edge[1] * edge[2] == 1 && knob.tau && !skips_nothing(knob) &&
         conv.input.scalar_type() != at::kDouble;
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
