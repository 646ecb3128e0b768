// Hopper's convolution of deviations of two parts, by strips, and of an output in phases: turns
// tensors into kernel parameters.
#include "conv/deviation_parts.h"
#include "cuda/conv/arguments_sm90.h"
#include "cuda/conv/channels_last.h"
#include "cuda/conv/norms_sm90.h"
#include "cuda/conv/run_sm90.h"
#include "cuda/conv/sizes_sm90.h"
#include "cuda/device.h"
#include "cuda/operand.h"

namespace spamm::cuda {
namespace {

using at::Tensor;
using namespace kernels::conv::sm90;

constexpr int64_t kGroup = 64;  // channels that share a norm

bool phases_fit(const Convolution& conv) {
  const int64_t channels = conv.shape.out_channels / 4;
  const spamm::ConvShape& shape = conv.shape;
  return (2 * channels == kGroup || channels % kGroup == 0) &&
         4 * shape.images * shape.output.height * shape.output.width * blocks_of(channels, kGroup) <
             kMost;
}

bool parts_fit(const Convolution& conv, const Knob& knob, const DeviationParts& given) {
  const auto is_aligned = [](const Tensor& x) {
    return x.size(1) > 0 && x.size(1) * x.element_size() % kAlignment == 0;
  };
  const auto& parts = given.parts;
  if (parts.size() == 1) return strides_fit(log2_block(conv.blocks.edge), size2(conv.shape.stride));
  return parts.size() == 2 && parts[0].size(1) % kGroup == 0 && is_aligned(parts[0]) &&
         is_aligned(parts[1]) && !given.norms.empty() && runs_by_strips(conv, knob);
}

bool supports(const Convolution& conv, const Knob& knob, const DeviationParts& given) {
  return is_half(conv.input.scalar_type()) &&
         conv.shape.out_channels * conv.input.element_size() % kAlignment == 0 &&
         runs_as_deviation(conv) && parts_fit(conv, knob, given) && fits_hopper(conv) &&
         (!given.in_phases || phases_fit(conv));
}

template <class Element>
ConvolutionResult convolve(const Convolution& conv, const Knob& knob, const DeviationParts& given) {
  const OnDevice device(conv.input);
  const cudaStream_t stream = device.stream();
  const Tensor input = readable_pixels(conv.input), weight = readable_pixels(conv.weight);
  const int64_t channels = given.parts.size() == 1 ? input.size(1) : conv.shape.in_channels;
  Arguments arguments(conv, input.options(), channels);
  ConvParams& p = arguments.params;
  p.box = box_of(p.block);
  const TileSize tile = choose_tile(conv, p, /*dense=*/false, device.multiprocessors());
  const ConvNorms norms = conv_norms<Element>(conv, input, weight, tile, knob, stream);
  arguments.set(norms, knob, stream);
  Tensor second, norm_second;  // kept until the launch
  if (given.parts.size() > 1) {
    second = readable_pixels(given.parts[1]);
    norm_second = given.norms[1].contiguous();
    p.second = {second.const_data_ptr(), static_cast<int>(second.size(1)),
                norm_second.const_data_ptr<float>()};
  }
  auto sizes = conv.output_sizes();
  if (given.in_phases) {
    sizes = {sizes[0], sizes[1] / 4, sizes[2] * 2, sizes[3] * 2};
    p.phase_channels = static_cast<int>(sizes[1]);
  }
  arguments.set_output(sizes);
  ConvolutionResult result = finish<Element>(conv, arguments, input.const_data_ptr(),
                                             weight.const_data_ptr(), tile, device);
  if (given.in_phases) {
    const int64_t columns = columns_of_norms(sizes[1]);
    result.norms = result.norms.view(
        pixel_norms_shape(sizes[0], {sizes[2], sizes[3] / columns}, sizes[1] * columns));
  }
  return result;
}

ConvolutionResult run(const Convolution& conv, const Knob& knob, const DeviationParts& given) {
  return conv.input.scalar_type() == at::kHalf ? convolve<__half>(conv, knob, given)
                                               : convolve<__nv_bfloat16>(conv, knob, given);
}

const Backends<DeviationPartsBackend> registered(at::kCUDA, Rank::kHopper, {&supports, &run});

}  // namespace
}  // namespace spamm::cuda
