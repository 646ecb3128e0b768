// Hopper's convolution of half types, and of float32 as TF32: turns tensors into kernel parameters.
//
// The kernels read and write channels-last memory in which the channels of a pixel are a multiple
// of 16 bytes. Other inputs are copied. The output's channels must be such a multiple.
#include "conv/backend.h"
#include "cuda/conv/arguments_sm90.h"
#include "cuda/conv/boxes_sm90.h"
#include "cuda/conv/channels_last.h"
#include "cuda/conv/launch_sm90.h"
#include "cuda/conv/norms_sm90.h"
#include "cuda/conv/run_sm90.h"
#include "cuda/conv/sizes_sm90.h"
#include "cuda/device.h"
#include "cuda/operand.h"
#include "threshold.h"

namespace spamm::cuda {
namespace {

using at::Tensor;
using namespace kernels::conv::sm90;

// Computes a convolution with the boxes of `boxed`, which is the same one but in dense mode.
template <class Element>
ConvolutionResult convolve(const Convolution& conv, const Convolution& boxed, const Knob& knob,
                           bool dense) {
  const OnDevice device(conv.input);
  const cudaStream_t stream = device.stream();
  const Tensor input = readable_pixels(conv.input), weight = readable_pixels(conv.weight);
  Arguments arguments(boxed, input.options(), input.size(1));
  ConvParams& p = arguments.params;
  p.box = box_of(p.block);
  if (!dense && is_half(conv.input.scalar_type()) && knob.tau) {
    const auto box = box_of_several_pixels(conv);
    p.by_pixel = box.has_value();
    if (box) p.box = log2_block(*box);
  }
  p.log2_segments = choose_log2_segments(conv, dense, device.multiprocessors());
  const TileSize tile = choose_tile(conv, p, dense, device.multiprocessors());
  ConvNorms norms;
  if (dense) {
    arguments.set_dense(knob);
  } else {
    norms = conv_norms<Element>(conv, input, weight, tile, knob, stream);
    arguments.set(norms, knob, stream);
  }
  arguments.set_output(conv.output_sizes());
  // A copy of the weight is made in this call and so is not complete before it.
  p.weight_is_ready = conv.weight_is_ready && weight.is_same(conv.weight);
  return finish<Element>(conv, arguments, input.const_data_ptr(), weight.const_data_ptr(), tile,
                         device);
}

template <class Element>
ConvolutionResult convolve(const Convolution& conv, const Knob& knob) {
  // Boxes of dense mode may have several images, but the base has one.
  const bool dense = skips_nothing(knob) && !runs_as_deviation(conv);
  return convolve<Element>(conv, dense ? in_dense_mode(conv) : conv, knob, dense);
}

template <class Element>
ConvNormMaps find_norm_maps(const Convolution& conv) {
  const OnDevice device(conv.input);
  const Tensor input = readable_pixels(conv.input), weight = readable_pixels(conv.weight);
  const Arguments arguments(conv, input.options(), input.size(1));
  const ConvNorms norms =
      conv_norms<Element>(conv, input, weight, TileSize::kSmall, /*knob=*/{}, device.stream());
  return conv_norm_maps(conv, arguments.params, norms, device.stream());
}

// For TF32: the weight's norms are those of norm_map, so that pinned norms do not depend on
// PyTorch's setting.
Convolution with_norm_weight(Convolution conv) {
  if (!conv.norm_weight) {
    const Tensor norms =
        pixel_map(by_pixel(readable_pixels(conv.weight)), conv.block.m, conv.block.k);
    conv.norm_weight = norms.view({1, norms.size(0), -1});
  }
  return conv;
}

bool blocks_fit(const Convolution& conv) {
  return strides_fit(log2_block(conv.blocks.edge), size2(conv.shape.stride)) && fits_hopper(conv);
}

bool supports(const Convolution& conv, const Knob& knob) {
  const at::ScalarType dtype = conv.input.scalar_type();
  return (is_half(dtype) || (dtype == at::kFloat && conv.allow_tf32)) &&
         conv.shape.out_channels * conv.input.element_size() % kAlignment == 0 &&
         (skips_nothing(knob) && !runs_as_deviation(conv) ? sizes_fit_hopper(conv)
                                                          : blocks_fit(conv));
}

// A residual of float32 would need two blocks for a box.
bool fuses_epilogue(const Convolution& conv) {
  return !conv.residual || is_half(conv.input.scalar_type());
}

bool fuses_base(const Convolution& conv) {
  return conv.blocks.edge[0] == 1 && fuses_epilogue(conv);
}

ConvolutionResult run(const Convolution& conv, const Knob& knob) {
  switch (conv.input.scalar_type()) {
    case at::kHalf:
      return convolve<__half>(conv, knob);
    case at::kBFloat16:
      return convolve<__nv_bfloat16>(conv, knob);
    default:
      return convolve<float>(skips_nothing(knob) ? conv : with_norm_weight(conv), knob);
  }
}

ConvNormMaps norm_maps(const Convolution& conv) {
  switch (conv.input.scalar_type()) {
    case at::kHalf:
      return find_norm_maps<__half>(conv);
    case at::kBFloat16:
      return find_norm_maps<__nv_bfloat16>(conv);
    default:
      return find_norm_maps<float>(with_norm_weight(conv));
  }
}

const Backends<ConvBackend> registered(at::kCUDA, Rank::kHopper,
                                       {&supports, &run, &norm_maps, &fuses_epilogue, &fuses_base});

}  // namespace
}  // namespace spamm::cuda
