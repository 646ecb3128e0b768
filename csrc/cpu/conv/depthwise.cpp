// A depthwise convolution that skips: a group has one channel of the input and one of the output.
// Panels (cpu/conv/product.h) would multiply the zeros that fill them. Here neighbouring channels,
// which are groups, share a vector, and each has its own skip tests.
#include <array>
#include <cmath>

#include "conv/backend.h"
#include "conv/shape.h"
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
  std::array<double, kTogether> sums;
  for (int64_t first = 0; first < channels; first += kTogether) {
    const int64_t count = std::min(kTogether, channels - first);
    sums.fill(0);
    for (int64_t image = 0; image < images; ++image) {
      const T* const line = pixel + image * image_stride + first;
      for (int64_t c = 0; c < count; ++c) {
        const double x = static_cast<float>(line[c]);
        sums[c] += x * x;
      }
    }
    for (int64_t c = 0; c < count; ++c) norms[first + c] = static_cast<float>(std::sqrt(sums[c]));
  }
}

// Tells for each channel whether a block product is kept, and returns whether any is. A block of
// zeros (padding) only matters where it meets an infinite or NaN weight.
SPAMM_CPU_CLONES bool write_kept(const float* norm_weight, const float* norms, float scale,
                                 float tau, int64_t channels, int32_t* kept) {
  int32_t any = 0;
  for (int64_t c = 0; c < channels; ++c) {
    const float skip_norm = norms[c] * scale;
    const float limit = skip_norm == 0 ? INFINITY : tau;
    kept[c] = !(norm_weight[c] * skip_norm < limit);
    any |= kept[c];
  }
  return any != 0;
}

// A kernel position of one output pixel at which products are kept. `offset`: of the input pixel in
// its picture.
template <class T>
struct Step {
  int64_t offset;
  const T* padding;  // null where the position is inside of the picture
  const float* weight;
  const int32_t* kept;
};

// The sums of all channels of one pixel.
template <class T>
SPAMM_CPU_CLONES void add(const T* picture, const std::vector<Step<T>>& steps, int64_t channels,
                          float* __restrict sums) {
  std::fill_n(sums, channels, 0.0f);
  for (const Step<T>& step : steps) {
    const T* const line = step.padding ? step.padding : picture + step.offset;
    const float* const weight = step.weight;
    const int32_t* const kept = step.kept;
    for (int64_t c = 0; c < channels; ++c) {
      const float sum = sums[c] + weight[c] * static_cast<float>(line[c]);
      sums[c] = kept[c] ? sum : sums[c];
    }
  }
}

template <class T>
SPAMM_CPU_CLONES void store(const float* sums, const float* bias, bool relu, int64_t channels,
                            T* output) {
  for (int64_t c = 0; c < channels; ++c) {
    const float sum = sums[c] + (bias == nullptr ? 0.0f : bias[c]);
    output[c] = static_cast<T>(relu && sum < 0 ? 0.0f : sum);  // keeps NaN, like torch's relu
  }
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
  const std::vector<float> zeros(channels);
  at::parallel_for(0, image_blocks * shape.output.height, 1, [&](int64_t from, int64_t to) {
    std::vector<float> sums(channels);
    std::vector<int32_t> kept(positions * channels);
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
          int32_t* const of_position = kept.data() + position * channels;
          if (write_kept(norm_weight.const_data_ptr<float>() + position * channels, norm, scale,
                         tau, channels, of_position)) {
            steps.push_back({pixel * channels, seen ? nullptr : padding.data(),
                             weight.const_data_ptr<float>() + position * channels, of_position});
          }
        }
        for (int64_t image = block * edge; image < block * edge + images; ++image) {
          add(pixels + image * image_stride, steps, channels, sums.data());
          const int64_t place = (image * shape.output.height + row) * shape.output.width + column;
          store(sums.data(), conv.bias ? bias.const_data_ptr<float>() : nullptr,
                conv.activation == Activation::kRelu, channels, results + place * channels);
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
