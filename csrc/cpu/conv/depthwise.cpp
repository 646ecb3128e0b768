// Convolutions of groups of few channels that skip: depthwise ones, whose groups have one channel
// of the input and one of the output, and groups of 4, 8 or 16 of each. Panels (cpu/conv/product.h)
// would multiply zeros. Neighbouring output channels share a vector, of one group or of several.
// Each group has its own skip tests. The input is read in place.
#include <bit>
#include <cstring>

#include "conv/backend.h"
#include "conv/shape.h"
#include "cpu/common/convert.h"
#include "cpu/common/machine.h"
#include "cpu/common/transpose.h"
#include "cpu/multiply/slice_kernel.h"
#include "threshold.h"

namespace spamm::cpu {
namespace {

using at::Tensor;

constexpr int kPart = 16;  // channels, the least that are computed together
constexpr int kHalf = kPart / 2;
constexpr int64_t kLeastParts = 4;         // of a strip, if there are so many
constexpr int64_t kHeldBytes = 384 << 10;  // of the input and its norms, that a task reads again
constexpr int kColumns = 7;                // divides the widths of most networks' pictures

template <class N, int lanes>
using Vector [[gnu::vector_size(lanes * sizeof(N))]] = N;  // slow where it has no register

template <int lanes>
SPAMM_INLINE void load(const float* from, Vector<float, lanes>& x) {
  std::memcpy(&x, from, sizeof(x));
}

template <int lanes>
SPAMM_INLINE void load_magnitude(const float* from, Vector<float, lanes>& x) {
  Vector<uint32_t, lanes> bits;
  std::memcpy(&bits, from, sizeof(x));
  bits &= ~(uint32_t{1} << 31);
  std::memcpy(&x, &bits, sizeof(x));
}

// Tells for each norm of a weight from which norm of a pixel on its products are valid: the least x
// with !(norm * (x * scale) < tau), which no larger x fails.
SPAMM_CPU_CLONES void find_limits(const float* norms, int64_t count, float scale, float tau,
                                  float* limits) {
  constexpr uint32_t kNear = 3;  // roundings of the quotient and of the products
  constexpr uint32_t kInfinity = 0x7f800000u;
  uint32_t wrong = 0;
  for (int64_t i = 0; i < count; ++i) {
    uint32_t bits = std::bit_cast<uint32_t>(tau / (norms[i] * scale));
    bits -= std::min(bits, kNear);
    for (uint32_t step = 0; step < 2 * kNear; ++step)
      bits += norms[i] * (std::bit_cast<float>(bits) * scale) < tau;
    const float below = std::bit_cast<float>(bits - (bits > 0));
    limits[i] = std::bit_cast<float>(bits);
    wrong |=
        (norms[i] * (limits[i] * scale) < tau) | ((bits > 0) & !(norms[i] * (below * scale) < tau));
  }
  for (int64_t i = 0; i < count && wrong; ++i) {  // numbers at the ends of their range
    uint32_t least = 0, most = kInfinity;
    while (least < most) {
      const uint32_t middle = (least + most) / 2;
      const bool valid = !(norms[i] * (std::bit_cast<float>(middle) * scale) < tau);
      (valid ? most : least) = middle + !valid;
    }
    limits[i] = std::bit_cast<float>(least);
  }
}

// Returns the largest limit of a weight that is not zero; infinity if a weight is not finite.
SPAMM_CPU_CLONES float largest_limit(const float* weights, const float* limits, int64_t count) {
  float largest = 0;
  int others = 0;
  for (int64_t i = 0; i < count; ++i) {
    others |= !(weights[i] - weights[i] == 0);
    largest = std::max(largest, weights[i] != 0 ? limits[i] : 0);
  }
  return others ? std::numeric_limits<float>::infinity() : largest;
}

// Pixels of a row, of some images.
struct Pixels {
  const float* first;
  int64_t width, next, channels, images, next_image;
};

// Tells whether each number of an image but for zeros has at least the magnitude `limit`.
SPAMM_CPU_CLONES bool all_large(const Pixels& pixels, float limit) {
  Vector<uint32_t, kHalf> bits, least[] = {~(bits ^ bits), ~(bits ^ bits)};
  const int64_t runs = pixels.channels == pixels.next ? 1 : pixels.width;
  const int64_t size = pixels.width / runs * pixels.channels;
  for (int64_t run = 0; run < runs; ++run) {
    const float* const from = pixels.first + run * pixels.next;
    for (int64_t i = 0; i < size; i += kPart) {
      for (int64_t half = 0; half < 2; ++half) {
        std::memcpy(&bits, from + std::min(i, size - kPart) + half * kHalf, sizeof(bits));
        bits = bits + bits - 1;  // of magnitudes; of a zero, the largest
        least[half] = bits < least[half] ? bits : least[half];
      }
    }
  }
  const uint32_t twice = 2 * std::bit_cast<uint32_t>(limit);
  bool large = true;
  for (int lane = 0; lane < kHalf; ++lane)
    large &= twice == 0 || std::min(least[0][lane], least[1][lane]) >= twice - 1;
  return large;
}

// The norms of the groups of `depth` channels, one for each channel. Sums of squares that are far
// from the ends of float32 are found in it, others in float64. Without errno, roots vectorise.
SPAMM_CPU_CLONES [[gnu::optimize("no-math-errno")]] void find_norms(const Pixels& pixels,
                                                                    int64_t depth, float* norms) {
  constexpr float kLeast = 1e-30f, kMost = 1e30f;
  for (int64_t column = 0; column < pixels.width; ++column, norms += pixels.channels) {
    for (int64_t part = 0; part < pixels.channels; part += kPart) {
      const int64_t c = std::min(part, pixels.channels - kPart);
      const float* const first = pixels.first + column * pixels.next + c;
      Vector<float, kHalf> sums[] = {{}, {}}, x;
      Vector<uint32_t, kHalf> any[] = {{}, {}}, bits;  // of the entries: zeros need no float64
      for (int64_t i = 0; i < pixels.images; ++i) {
#pragma GCC unroll 2
        for (int64_t half = 0; half < 2; ++half) {
          load<kHalf>(first + i * pixels.next_image + half * kHalf, x);
          std::memcpy(&bits, &x, sizeof(bits));
          sums[half] += x * x, any[half] |= bits + bits;
        }
      }
      float squares[kPart];
      uint32_t nonzero[kPart];
      std::memcpy(squares, sums, sizeof(squares)), std::memcpy(nonzero, any, sizeof(nonzero));
      for (int64_t group = 0; group < kPart && depth > 1; group += depth) {
        float sum = 0;
        for (int64_t i = 0; i < depth; ++i) sum += squares[group + i];
        for (int64_t i = 0; i < depth; ++i) squares[group + i] = sum;
      }
      int others = 0;
      for (int lane = 0; lane < kPart; ++lane) {
        others |= ((squares[lane] < kLeast) & (nonzero[lane] != 0)) | (squares[lane] > kMost);
        norms[c + lane] = __builtin_sqrtf(squares[lane]);
      }
      for (int64_t lane = 0; lane < kPart && others; ++lane) {
        const float* const group = first + lane / depth * depth;
        double sum = 0;
        for (int64_t i = 0; i < pixels.images * depth; ++i) {
          const double wide = group[i / depth * pixels.next_image + i % depth];
          sum += wide * wide;
        }
        norms[c + lane] = static_cast<float>(__builtin_sqrt(sum));
      }
    }
  }
}

// One row of the output of some images, of some channels.
struct Row {
  // For each kernel row and column of the input, padding included: norms, and each image's pixels.
  const float *const *norms, *const *pixels;
  int64_t line, table;  // pointers of a kernel row, and of an image
  const float *weights, *limits, *bias;
  int64_t next_position, next_depth, channels;  // of the weights; of the row
  int64_t kernel_rows, kernel_columns, stride, dilation, columns;
  bool relu, slides;  // slides: pixels are read once for all columns of the kernel
  float* output;
  int64_t images, next_image, next_column;  // of the output
};

template <int lanes, int count>
SPAMM_INLINE void finish(const Row& row, int64_t image, int64_t column, int64_t channel,
                         const Vector<float, lanes> (&sums)[count]) {
  Vector<float, lanes> bias;
  load<lanes>(row.bias + channel, bias);
  float* const to = row.output + image * row.next_image + column * row.next_column + channel;
#pragma GCC unroll 8
  for (int i = 0; i < count; ++i) {
    Vector<float, lanes> result = sums[i] + bias;
    if (row.relu) result = result < 0 ? Vector<float, lanes>{} : result;  // keeps NaN, as torch's
    std::memcpy(to + i * row.next_column, &result, sizeof(result));
  }
}

// Some columns of a vector of channels, of some images, which share the tests. What is skipped is
// finite, since its norm is: times 0 it changes no sum.
template <int lanes, bool tested, int images, int columns, int kernel, int stride>
SPAMM_INLINE void slide(const Row& row, int64_t image, int64_t column, int64_t channel) {
  Vector<float, lanes> sums[images][columns], weight[kernel], limits_of[kernel], x[images], norm;
#pragma GCC unroll 4
  for (int i = 0; i < images; ++i)
#pragma GCC unroll 8
    for (int c = 0; c < columns; ++c) sums[i][c] = Vector<float, lanes>{};
  const float *weights = row.weights + channel, *limits = row.limits + channel;
  for (int64_t r = 0; r < row.kernel_rows; ++r) {
#pragma GCC unroll 8
    for (int k = 0; k < kernel; ++k) {
      load<lanes>(weights, weight[k]);
      if (tested) load<lanes>(limits, limits_of[k]);
      weights += row.next_position, limits += row.next_position;
    }
    const Vector<float, lanes>* limit = limits_of;
    const float* const* const norms = row.norms + r * row.line + column * stride;
    const float* const* const pixels =
        row.pixels + image * row.table + r * row.line + column * stride;
#pragma GCC unroll 32
    for (int pixel = 0; pixel < (columns - 1) * stride + kernel; ++pixel) {
#pragma GCC unroll 4
      for (int i = 0; i < images; ++i) load<lanes>(pixels[i * row.table + pixel] + channel, x[i]);
      if (tested) {
        load_magnitude<lanes>(norms[pixel] + channel, norm);
        if (images > 1) asm("" : "+r"(limit));  // read from memory: sums need the registers
      }
#pragma GCC unroll 8
      for (int k = 0; k < kernel; ++k) {
        const int c = pixel - k;  // times the stride
        if (c < 0 || c % stride != 0 || c / stride >= columns) continue;
        Vector<float, lanes> factor = weight[k];
        if (tested) factor = norm < limit[k] ? Vector<float, lanes>{} : factor;
#pragma GCC unroll 4
        for (int i = 0; i < images; ++i) sums[i][c / stride] += factor * x[i];
      }
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < images; ++i) finish<lanes>(row, image + i, column, channel, sums[i]);
}

// The same for any kernel, of one image. Groups of `depth` channels share a vector, or have some.
template <int lanes, bool tested, int columns, int depth>
SPAMM_INLINE void add_groups(const Row& row, int64_t image, int64_t column, int64_t channel) {
  static constexpr float kZeros[kPart] = {};
  constexpr int kVectors = std::max(depth / lanes, 1);
  Vector<float, lanes> sums[kVectors][columns], weight[kVectors], limit, x, norm;
  Vector<int32_t, lanes> dropped[columns];
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v)
#pragma GCC unroll 8
    for (int c = 0; c < columns; ++c) sums[v][c] = Vector<float, lanes>{};
  const float *weights = row.weights + channel, *limits = row.limits + channel;
  for (int64_t position = 0; position < row.kernel_rows * row.kernel_columns; ++position) {
    const int64_t first = position / row.kernel_columns * row.line + column * row.stride +
                          position % row.kernel_columns * row.dilation;
    const float* pixels[columns];
    bool any = !tested || depth < lanes;
    if (tested) load<lanes>(limits, limit);
#pragma GCC unroll 8
    for (int c = 0; c < columns; ++c) {
      const int64_t place = first + c * row.stride;
      pixels[c] = row.pixels[image * row.table + place] + channel;
      if (tested && depth < lanes) {
        load_magnitude<lanes>(row.norms[place] + channel, norm);
        dropped[c] = norm < limit;
      } else if (tested) {  // a vector has one test
        const bool drops = row.norms[place][channel] < *limits;
        pixels[c] = drops ? kZeros : pixels[c];
        any |= !drops;
      }
    }
#pragma GCC unroll 16
    for (int i = 0; i < depth; ++i) {
      if (!any) break;
#pragma GCC unroll 4
      for (int64_t v = 0; v < kVectors; ++v)
        load<lanes>(weights + i * row.next_depth + v * lanes, weight[v]);
#pragma GCC unroll 8
      for (int c = 0; c < columns; ++c) {
        if constexpr (depth >= lanes) {
#pragma GCC unroll 4
          for (int v = 0; v < kVectors; ++v) sums[v][c] += weight[v] * pixels[c][i];
        } else {
          load<lanes>(pixels[c], x);
#if defined(__clang__)  // which does not know the other way
          for (int lane = 0; lane < lanes; ++lane) x[lane] = pixels[c][lane / depth * depth + i];
#else
          Vector<int32_t, lanes> from = {};
#pragma GCC unroll 16
          for (int lane = 0; lane < lanes; ++lane) from[lane] = lane / depth * depth + i;
          if (depth > 1) x = __builtin_shuffle(x, from);
#endif
          if (tested) {
            sums[0][c] += (dropped[c] ? Vector<float, lanes>{} : weight[0]) * x;
          } else {
            sums[0][c] += weight[0] * x;
          }
        }
      }
    }
    weights += row.next_position, limits += row.next_position;
  }
#pragma GCC unroll 4
  for (int64_t v = 0; v < kVectors; ++v)
    finish<lanes>(row, image, column, channel + v * lanes, sums[v]);
}

// Tells whether slide() takes rows of this shape.
bool may_slide(const ConvShape& shape) {
  const int64_t kernel = shape.kernel.width, stride = shape.stride.width;
  return shape.groups == shape.in_channels && shape.output.width >= kColumns &&
         shape.dilation.width == 1 && stride <= 2 &&
         (kernel == 3 || kernel == 5 || (kernel == 7 && stride == 1));
}

template <int lanes, bool tested, int kernel, int stride>
SPAMM_INLINE void slide_row(const Row& row) {
  constexpr int kTogether = tested ? lanes / 4 : 1;  // as many as there are registers for
  int64_t image = 0;
  for (; image + kTogether <= row.images; image += kTogether) {
    constexpr int kOfTile = kTogether > 1 ? 4 : kColumns;
    for (int64_t c = 0; c < row.columns; c += kOfTile)  // the last ones may overlap others
      for (int64_t channel = 0; channel < row.channels; channel += lanes)
        slide<lanes, tested, kTogether, kOfTile, kernel, stride>(
            row, image, std::min(c, row.columns - kOfTile),
            std::min(channel, row.channels - lanes));
  }
  for (; kTogether > 1 && image < row.images; ++image)
    for (int64_t c = 0; c < row.columns; c += kColumns)
      for (int64_t channel = 0; channel < row.channels; channel += lanes)
        slide<lanes, tested, 1, kColumns, kernel, stride>(row, image,
                                                          std::min(c, row.columns - kColumns),
                                                          std::min(channel, row.channels - lanes));
}

template <int lanes, bool tested, int columns, int depth>
SPAMM_INLINE void add_row(const Row& row) {
  constexpr int kChannels = std::max(lanes, depth);
  for (int64_t image = 0; image < row.images; ++image)
    for (int64_t c = 0; c < row.columns; c += columns)
      for (int64_t channel = 0; channel < row.channels; channel += kChannels)
        add_groups<lanes, tested, columns, depth>(row, image, std::min(c, row.columns - columns),
                                                  std::min(channel, row.channels - kChannels));
}

template <int lanes, bool tested, int depth>
SPAMM_INLINE void convolve_row(const Row& row) {
  if constexpr (depth == 1) {
    if (row.slides) {
      if (row.kernel_columns == 7) return slide_row<lanes, tested, 7, 1>(row);
      if (row.kernel_columns == 5)
        return row.stride == 1 ? slide_row<lanes, tested, 5, 1>(row)
                               : slide_row<lanes, tested, 5, 2>(row);
      return row.stride == 1 ? slide_row<lanes, tested, 3, 1>(row)
                             : slide_row<lanes, tested, 3, 2>(row);
    }
  }
  constexpr int kOfTile = depth > lanes ? 4 : kColumns;
  row.columns < kOfTile ? add_row<lanes, tested, 1, depth>(row)
                        : add_row<lanes, tested, kOfTile, depth>(row);
}

#if defined(__x86_64__)
template <bool tested, int depth>
[[gnu::target("avx512f,fma")]] void convolve_row_avx512(const Row& row) {
  convolve_row<depth == kHalf ? kHalf : kPart, tested, depth>(row);  // a group has a vector
}

template <bool tested, int depth>
[[gnu::target("avx2,fma")]] void convolve_row_avx2(const Row& row) {
  convolve_row<kHalf, tested, depth>(row);
}
#endif

template <bool tested, int depth>
void convolve_row(const Row& row) {
#if defined(__x86_64__)
  static const auto kernel =
      of_machine(convolve_row_avx512<tested, depth>, convolve_row_avx2<tested, depth>,
                 convolve_row<4, tested, depth>);
#else
  constexpr auto kernel = convolve_row<4, tested, depth>;
#endif
  kernel(row);
}

template <bool tested>
void convolve_row(const Row& row, int64_t depth) {
  return depth == 1   ? convolve_row<tested, 1>(row)
         : depth == 4 ? convolve_row<tested, 4>(row)
         : depth == 8 ? convolve_row<tested, 8>(row)
                      : convolve_row<tested, kPart>(row);
}

// Writes a row's pixels, which `row` has as its output.
template <class T>
SPAMM_CPU_CLONES void store_row(const Row& row, T* to, int64_t next_image, int64_t next_column) {
  for (int64_t i = 0; i < row.images * row.columns; ++i) {
    const float* const from = row.output + i * row.next_column;
    T* const pixel = to + i / row.columns * next_image + i % row.columns * next_column;
    for (int64_t c = 0; c < row.channels; ++c) pixel[c] = narrow<T>(from[c]);
  }
}

// A task is some rows of the output, in a strip of channels, of the images of a block. It looks at
// a row of the input when it first reads it: nothing is skipped where its least number is large
// enough. The first image that has another, and all after it, are tested, by norms of the block.
template <class T>
class NarrowGroups {
 public:
  NarrowGroups(const Convolution& conv, const Knob& knob)
      : shape_(conv.shape),
        edge_(conv.blocks.edge[0]),
        depth_(shape_.group_in_channels()),
        channels_(std::max<int64_t>(shape_.in_channels, kPart)),
        positions_(shape_.kernel_positions()),
        line_((shape_.output.width - 1) * shape_.stride.width + shape_.window().width),
        held_rows_(std::min(shape_.window().height, shape_.input.height)),
        slides_(may_slide(shape_)),
        input_(with_channels(conv.input.to(at::kFloat))),
        weights_(by_channel(conv.weight)),
        norm_weights_(
            by_channel((depth_ == 1 && !conv.norm_weight ? conv.weight.abs() : weight_norms(conv))
                           .reshape({shape_.groups, 1, positions_})
                           .expand({shape_.groups, depth_, positions_}))),
        bias_(conv.bias ? by_channel(*conv.bias) : std::vector<float>(channels_)),
        relu_(conv.activation == Activation::kRelu),
        tau_(static_cast<float>(host_scalar(*knob.tau))),
        limits_(limits_of(std::min(edge_, shape_.images))),
        last_limits_(shape_.images > edge_ && shape_.images % edge_ != 0
                         ? limits_of(shape_.images % edge_)
                         : limits_),
        output_(with_large_pages(
            at::empty({shape_.images, channels_, shape_.output.height, shape_.output.width},
                      conv.input.options(), at::MemoryFormat::ChannelsLast))) {}

  Tensor run() const {
    const int64_t height = shape_.output.height, parts = channels_ / kPart;
    const int64_t part_bytes =
        (held_rows_ + 1) * shape_.input.width * kPart * static_cast<int64_t>(sizeof(float));
    const int64_t strips =
        blocks_of(parts, std::min(parts, std::max(kHeldBytes / part_bytes, kLeastParts)));
    const auto begin = [&](int64_t strip) {
      return strip == strips ? channels_ : parts * strip / strips * kPart;
    };
    // Over the rows of all strips, so that a thread looks at few rows that another one does, too.
    at::parallel_for(0, blocks_of(shape_.images, edge_) * strips * height, shape_.kernel.height,
                     [&](int64_t from, int64_t to) {
                       for (int64_t rows; from < to; from += rows) {
                         const int64_t strip = from / height % strips, row = from % height;
                         rows = std::min(to - from, height - row);
                         convolve_rows(from / height / strips,
                                       {begin(strip), begin(strip + 1) - begin(strip)},
                                       {row, rows});
                       }
                     });
    return output_.narrow(1, 0, shape_.in_channels);
  }

 private:
  struct Limits {
    std::vector<float> each;  // (positions, channels)
    float largest;
  };

  // As float32, channels last, with zeros.
  Tensor with_channels(const Tensor& x) const {
    const int64_t missing = channels_ - shape_.in_channels;
    return (missing ? at::constant_pad_nd(x, {0, 0, 0, 0, 0, missing}) : x)
        .contiguous(at::MemoryFormat::ChannelsLast);
  }

  // (channels, ...) to (..., channels), with zeros.
  std::vector<float> by_channel(const Tensor& x) const {
    const int64_t size = x.numel() / shape_.in_channels;
    const Tensor source = x.to(at::kFloat).contiguous();
    std::vector<float> result(channels_ * size);
    transpose(source.const_data_ptr<float>(), size, result.data(), channels_, shape_.in_channels,
              size);
    return result;
  }

  Limits limits_of(int64_t images) const {
    const int64_t count = positions_ * channels_;
    const float scale = std::sqrt(static_cast<float>(edge_) / static_cast<float>(images));
    Limits limits{std::vector<float>(count), 0};
    find_limits(norm_weights_.data(), count, scale, tau_, limits.each.data());
    for (int64_t i = 0; i < depth_; ++i)
      limits.largest = std::max(
          limits.largest, largest_limit(weights_.data() + i * count, limits.each.data(), count));
    return limits;
  }

  void convolve_rows(int64_t block, Range channels, Range rows) const {
    const int64_t images = std::min(edge_, shape_.images - block * edge_);
    const Limits& limits = images < edge_ && shape_.images > edge_ ? last_limits_ : limits_;
    const int64_t next_row = shape_.input.width * channels_;
    const Pixels pixels{input_.template const_data_ptr<float>() +
                            block * edge_ * shape_.input.height * next_row + channels.begin,
                        shape_.input.width,
                        channels_,
                        channels.size,
                        images,
                        shape_.input.height * next_row};
    const int64_t width = shape_.output.width, next = shape_.output.height * width;
    const bool own_norms = images > 1 || depth_ > 1;  // else a norm is a magnitude
    const int64_t norms_of_row = shape_.input.width * channels.size;
    const Tensor memory =
        at::empty({(own_norms ? held_rows_ * norms_of_row : 0) +
                   channels.size * (1 + (std::is_same_v<T, float> ? 0 : images * width))},
                  at::kFloat);
    float* const norms = std::fill_n(memory.mutable_data_ptr<float>(), channels.size, 0.0f);
    const float* const zeros = norms - channels.size;
    const int64_t table = shape_.kernel.height * line_;
    std::vector<const float*> tables((images + 1) * table);
    const float **const norm_table = tables.data(), **const pixel_table = norm_table + table;
    const auto row_of = [&](int64_t image, int64_t y) {
      Pixels row = pixels;
      row.first += image * pixels.next_image + y * next_row;
      return row;
    };
    // Calls visit(y, place) for the rows of the input that a row of the output reads anew.
    std::vector<int64_t> held(held_rows_);
    const auto each_new_row = [&](int64_t row, const auto& visit) {
      for (int64_t k = 0; k < shape_.kernel.height; ++k) {
        const int64_t y =
            row * shape_.stride.height - shape_.padding.height + k * shape_.dilation.height;
        if (y < 0 || y >= shape_.input.height) continue;
        if (std::exchange(held[y % held_rows_], y) != y) visit(y, y % held_rows_);
      }
    };
    const auto convolve = [&](int64_t row, int64_t image, int64_t count, bool tested) {
      for (int64_t i = 0; i < count; ++i)
        fill_table(pixel_table + i * table, row, zeros,
                   [&](int64_t y) { return std::pair(row_of(image + i, y).first, channels_); });
      const int64_t c = channels.begin;
      T* const to = output_.template mutable_data_ptr<T>() +
                    ((block * edge_ + image) * next + row * width) * channels_ + c;
      Row task{own_norms ? norm_table : pixel_table,
               pixel_table,
               line_,
               table,
               weights_.data() + c,
               limits.each.data() + c,
               bias_.data() + c,
               channels_,
               positions_ * channels_,
               channels.size,
               shape_.kernel.height,
               shape_.kernel.width,
               shape_.stride.width,
               shape_.dilation.width,
               width,
               relu_,
               slides_,
               norms + (own_norms ? held_rows_ * norms_of_row : 0),
               count,
               width * channels.size,
               channels.size};
      if constexpr (std::is_same_v<T, float>)
        std::tie(task.output, task.next_image, task.next_column) =
            std::tuple(to, next * channels_, channels_);
      tested ? convolve_row<true>(task, depth_) : convolve_row<false>(task, depth_);
      if constexpr (!std::is_same_v<T, float>) store_row(task, to, next * channels_, channels_);
    };
    bool whole = std::isfinite(limits.largest);
    int64_t done = 0;  // images
    for (; whole && done < images; done += whole) {
      held.assign(held_rows_, -1);
      for (int64_t row = rows.begin; whole && row < rows.end(); ++row) {
        each_new_row(row, [&](int64_t y, int64_t) {
          whole = whole && all_large(row_of(done, y), limits.largest);
        });
        if (whole) convolve(row, done, 1, false);
      }
    }
    if (done == images) return;
    held.assign(held_rows_, -1);
    for (int64_t row = rows.begin; row < rows.end(); ++row) {
      if (own_norms) {
        each_new_row(row, [&](int64_t y, int64_t place) {
          find_norms(row_of(0, y), depth_, norms + place * norms_of_row);
        });
        fill_table(norm_table, row, zeros, [&](int64_t y) {
          return std::pair(norms + y % held_rows_ * norms_of_row, channels.size);
        });
      }
      convolve(row, done, images - done, true);
    }
  }

  // The pixels of an output row's windows. row_at(y): the first of a row, and the distance between.
  template <class RowAt>
  void fill_table(const float** table, int64_t row, const float* zeros, const RowAt& row_at) const {
    const int64_t before = std::min(shape_.padding.width, line_);
    const int64_t inside = std::min(shape_.input.width, line_ - before);
    for (int64_t k = 0; k < shape_.kernel.height; ++k, table += line_) {
      const int64_t y =
          row * shape_.stride.height - shape_.padding.height + k * shape_.dilation.height;
      if (y < 0 || y >= shape_.input.height) {
        std::fill_n(table, line_, zeros);
        continue;
      }
      const auto [first, next] = row_at(y);
      std::fill_n(table, before, zeros);
      for (int64_t x = 0; x < inside; ++x) table[before + x] = first + x * next;
      std::fill(table + before + inside, table + line_, zeros);
    }
  }

  const ConvShape& shape_;
  int64_t edge_, depth_, channels_;       // images of a block; of a group; of the input, padded
  int64_t positions_, line_, held_rows_;  // of the kernel; of the input, that a row reads
  bool slides_;
  Tensor input_;
  std::vector<float> weights_, norm_weights_;  // (group's channels, positions, channels)
  std::vector<float> bias_;
  bool relu_;
  float tau_;
  Limits limits_, last_limits_;  // of blocks, and of the last one
  Tensor output_;
};

// Blocks are one pixel of several images, and tau is held: a search takes the usual path.
bool supports(const Convolution& conv, const Knob& knob) {
  const Box& edge = conv.blocks.edge;
  const int64_t depth = conv.shape.group_in_channels();
  return conv.shape.group_out_channels() == depth && conv.shape.groups > 1 &&
         (depth == 1 || depth == 4 || depth == 8 || depth == kPart) && edge[1] * edge[2] == 1 &&
         knob.tau && !skips_nothing(knob) && conv.input.scalar_type() != at::kDouble &&
         conv.input.numel() > 0;
}

ConvolutionResult run(const Convolution& conv, const Knob& knob) {
  const at::ScalarType dtype = conv.input.scalar_type();
  return {dtype == at::kHalf       ? NarrowGroups<at::Half>(conv, knob).run()
          : dtype == at::kBFloat16 ? NarrowGroups<at::BFloat16>(conv, knob).run()
                                   : NarrowGroups<float>(conv, knob).run(),
          Tensor()};
}

const Backends<ConvBackend> registered(at::kCPU, Rank::kSpecial,
                                       {.convolve = {&supports, &run}, .name = "cpu-depthwise"});

}  // namespace
}  // namespace spamm::cpu
