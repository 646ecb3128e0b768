// A depthwise convolution that skips: a group has one channel of the input and one of the output.
// Panels (cpu/conv/product.h) would multiply the zeros that fill them. Here neighbouring channels,
// which are groups, share a vector, and each has its own skip tests.
#include <array>
#include <cmath>

#include "conv/backend.h"
#include "conv/shape.h"
#include "cpu/common/convert.h"
#include "cpu/common/machine.h"
#include "stage_range.h"
#include "threshold.h"

namespace spamm::cpu {
namespace {

using at::Tensor;

constexpr int64_t kTogether = 64;  // channels

// The squares of one channel of several images, summed in float64: exact enough, and in range.
template <class T>
SPAMM_CPU_CLONES void write_norms(const T* pixel, int64_t images, int64_t image_stride,
                                  int64_t channels, float* norms) {
  if (images == 1) {  // the root of one square
    for (int64_t c = 0; c < channels; ++c) norms[c] = std::abs(widen(pixel[c]));
    return;
  }
  std::array<double, kTogether> sums;
  for (int64_t first = 0; first < channels; first += kTogether) {
    const int64_t count = std::min(kTogether, channels - first);
    sums.fill(0);
    for (int64_t image = 0; image < images; ++image) {
      const T* const line = pixel + image * image_stride + first;
      for (int64_t c = 0; c < count; ++c) {
        const double x = widen(line[c]);
        sums[c] += x * x;
      }
    }
    for (int64_t c = 0; c < count; ++c) norms[first + c] = static_cast<float>(std::sqrt(sums[c]));
  }
}

// Writes each channel's weight where its block product is kept, else 0, and tells whether any is
// kept. What is skipped is finite, since its norm is: times 0 it changes no sum. A block of zeros
// (padding) only matters where it meets an infinite or NaN weight.
SPAMM_CPU_CLONES bool write_kept(const float* weight, const float* norm_weight, const float* norms,
                                 float scale, float tau, int64_t channels, float* kept) {
  int32_t any = 0;
  for (int64_t c = 0; c < channels; ++c) {
    const float skip_norm = norms[c] * scale;
    const float limit = skip_norm == 0 ? INFINITY : tau;
    const bool is_kept = !(norm_weight[c] * skip_norm < limit);
    kept[c] = is_kept ? weight[c] : 0.0f;
    any |= is_kept;
  }
  return any != 0;
}

// A kernel position of one output pixel at which products are kept. `offset`: of the input pixel in
// its picture.
template <class T>
struct Step {
  int64_t offset;
  const T* padding;     // null where the position is inside of the picture
  const float* weight;  // where kept
};

// The end of the sums of a pixel.
struct End {
  const float* bias;  // may be null
  bool relu;
};

// `vectors` vectors of channels of one pixel, from channel `first` on. Their sums stay in
// registers.
template <class T, int lanes, int vectors>
SPAMM_INLINE void convolve_channels(const T* picture, const std::vector<Step<T>>& steps,
                                    int64_t first, const End& end, T* output) {
  using Vector [[gnu::vector_size(lanes * sizeof(float))]] = float;
  Vector sums[vectors] = {};
  for (const Step<T>& step : steps) {
    const T* const line = (step.padding ? step.padding : picture + step.offset) + first;
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v) {
      float wide[lanes];
      for (int lane = 0; lane < lanes; ++lane) wide[lane] = widen(line[v * lanes + lane]);
      Vector x, weight;
      std::memcpy(&x, wide, sizeof(x));
      std::memcpy(&weight, step.weight + first + v * lanes, sizeof(weight));
      sums[v] += weight * x;
    }
  }
#pragma GCC unroll 4
  for (int v = 0; v < vectors; ++v) {
    const int64_t channel = first + int64_t{v} * lanes;
    Vector bias = {};
    if (end.bias) std::memcpy(&bias, end.bias + channel, sizeof(bias));
    Vector result = sums[v] + bias;
    if (end.relu) result = result < 0 ? Vector{} : result;  // keeps NaN, like torch's relu
    float wide[lanes];
    std::memcpy(wide, &result, sizeof(wide));
    for (int lane = 0; lane < lanes; ++lane) output[channel + lane] = narrow<T>(wide[lane]);
  }
}

// All channels of one pixel. The last vectors may overlap those before them.
template <class T>
SPAMM_CPU_CLONES void convolve_pixel(const T* picture, const std::vector<Step<T>>& steps,
                                     int64_t channels, const End& end, T* output) {
  constexpr int64_t kLanes = 16;
  int64_t first = 0;
  for (; first + 4 * kLanes <= channels; first += 4 * kLanes)
    convolve_channels<T, kLanes, 4>(picture, steps, first, end, output);
  for (; first + 2 * kLanes <= channels; first += 2 * kLanes)
    convolve_channels<T, kLanes, 2>(picture, steps, first, end, output);
  if (channels < kLanes) {
    for (; first < channels; ++first)
      convolve_channels<T, 1, 1>(picture, steps, first, end, output);
  }
  for (; first < channels; first += kLanes)
    convolve_channels<T, kLanes, 1>(picture, steps, std::min(first, channels - kLanes), end,
                                    output);
}

template <class T>
Tensor convolve(const Convolution& conv, const Knob& knob) {
  const ConvShape& shape = conv.shape;
  const int64_t channels = shape.in_channels, edge = conv.blocks.edge[0];
  const int64_t image_blocks = blocks_of(shape.images, edge), positions = shape.kernel_positions();
  const auto [height, width] = shape.input;
  const auto images_of = [&](int64_t block) { return std::min(edge, shape.images - block * edge); };
  const auto by_position = [&](const Tensor& x) {  // (channels, positions) to (positions, channels)
    return x.reshape({channels, positions}).t().to(at::kFloat).contiguous();
  };
  const Tensor input = conv.input.contiguous(at::MemoryFormat::ChannelsLast);
  const Tensor weight = by_position(conv.weight), norm_weight = by_position(weight_norms(conv));
  const Tensor bias = conv.bias ? conv.bias->to(at::kFloat).contiguous() : Tensor();
  const T* const pixels = input.const_data_ptr<T>();
  const int64_t image_stride = height * width * channels;

  const Tensor norms = at::empty({image_blocks, height * width, channels}, at::kFloat);
  auto* const first_norm = norms.mutable_data_ptr<float>();
  std::optional<StageRange> stage(kNormMapStage);
  at::parallel_for(0, image_blocks * height * width, 16, [&](int64_t from, int64_t to) {
    for (int64_t i = from; i < to; ++i) {
      const int64_t block = i / (height * width), pixel = i % (height * width);
      write_norms(pixels + block * edge * image_stride + pixel * channels, images_of(block),
                  image_stride, channels, first_norm + i * channels);
    }
  });
  stage.emplace(kMultiplyStage);

  const auto tau = static_cast<float>(host_scalar(*knob.tau));
  const Tensor output =
      at::empty(conv.output_sizes(), conv.input.options(), at::MemoryFormat::ChannelsLast);
  T* const results = output.mutable_data_ptr<T>();
  const float* const weights = weight.const_data_ptr<float>();
  const float* const norm_weights = norm_weight.const_data_ptr<float>();
  const std::vector<float> zeros(channels);
  const End end{conv.bias ? bias.const_data_ptr<float>() : nullptr,
                conv.activation == Activation::kRelu};
  at::parallel_for(0, image_blocks * shape.output.height, 1, [&](int64_t from, int64_t to) {
    const Tensor kept = at::empty({positions, channels}, at::kFloat);
    auto* const kept_weights = kept.mutable_data_ptr<float>();
    const std::vector<T> padding(channels);
    std::vector<Step<T>> steps;
    for (int64_t line = from; line < to; ++line) {
      const int64_t block = line / shape.output.height, row = line % shape.output.height;
      const int64_t images = images_of(block);
      const float scale = std::sqrt(static_cast<float>(edge) / static_cast<float>(images));
      for (int64_t column = 0; column < shape.output.width; ++column) {
        steps.clear();
        for (int64_t position = 0; position < positions; ++position) {
          const std::optional<Size2> seen = shape.seen_by(row, column, position);
          const int64_t pixel = seen ? seen->height * width + seen->width : 0;
          const float* const norm =
              seen ? first_norm + (block * height * width + pixel) * channels : zeros.data();
          const int64_t first = position * channels;
          if (write_kept(weights + first, norm_weights + first, norm, scale, tau, channels,
                         kept_weights + first)) {
            steps.push_back(
                {pixel * channels, seen ? nullptr : padding.data(), kept_weights + first});
          }
        }
        for (int64_t image = block * edge; image < block * edge + images; ++image) {
          const int64_t place = (image * shape.output.height + row) * shape.output.width + column;
          convolve_pixel(pixels + image * image_stride, steps, channels, end,
                         results + place * channels);
        }
      }
    }
  });
  return output;
}

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
      return {convolve<at::Half>(conv, knob), Tensor()};
    case at::kBFloat16:
      return {convolve<at::BFloat16>(conv, knob), Tensor()};
    default:
      return {convolve<float>(conv, knob), Tensor()};
  }
}

const Backends<ConvBackend> registered(at::kCPU, Rank::kSpecial,
                                       {.convolve = {&supports, &run}, .name = "cpu-depthwise"});

}  // namespace
}  // namespace spamm::cpu
