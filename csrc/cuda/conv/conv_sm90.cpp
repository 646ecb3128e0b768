// Hopper's convolution of half types, and of float32 as TF32: turns tensors into kernel parameters.
//
// The kernels read and write channels-last memory in which the channels of a pixel are a multiple
// of 16 bytes. Other inputs are copied. The output's channels must be such a multiple.
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "conv/backend.h"
#include "cuda/conv/arguments_sm90.h"
#include "cuda/conv/boxes_sm90.h"
#include "cuda/conv/channels_last.h"
#include "cuda/conv/launch_sm90.h"
#include "cuda/conv/norms_sm90.h"
#include "cuda/conv/sizes_sm90.h"
#include "cuda/device.h"
#include "cuda/operand.h"
#include "stage_range.h"
#include "threshold.h"

namespace spamm::cuda {
namespace {

using at::Tensor;
using namespace kernels::conv::sm90;

// Starts the kernel, whose parameters are complete but for the output norms.
template <class Element>
ConvolutionResult start(const Convolution& conv, Arguments& arguments, const Tensor& input,
                        const Tensor& weight, TileSize tile, const OnDevice& device) {
  const StageRange stage(kMultiplyStage);
  ConvParams& p = arguments.params;
  Tensor norms;
  if (conv.wants_output_norms) {
    norms =
        at::empty(layer_norms_shape(conv.shape.images, conv.shape.output, conv.shape.out_channels),
                  input.options().dtype(at::kFloat), at::MemoryFormat::Contiguous);
  }
  // If a box covers the images of its output norms, the kernel computes them.
  const bool in_kernel =
      norms.defined() && (p.box.images == log2_of(kLayerNormBlock) ||
                          (p.by_pixel && takes_norms_of_pixels(p.box, conv.shape.images)));
  if (in_kernel) p.norm_output = norms.mutable_data_ptr<float>();
  C10_CUDA_CHECK(launch_conv<Element>(
      p, input.const_data_ptr(), weight.const_data_ptr(),
      {.tile = tile, .multiprocessors = device.multiprocessors(), .stream = device.stream()}));
  if (norms.defined() && !in_kernel) {
    output_norms<Element>(arguments.output, norms, device.stream());
  }
  return {arguments.output, norms};
}

template <class Element>
ConvolutionResult convolve(const Convolution& conv, const Knob& knob) {
  const OnDevice device(conv.input);
  const bool dense = skips_nothing(knob);
  // The same convolution, in the boxes of dense mode.
  const Convolution boxed = dense ? in_dense_mode(conv) : conv;
  const Tensor input = readable_pixels(conv.input), weight = readable_pixels(conv.weight);
  Arguments arguments(boxed, input.options(), input.size(1));
  ConvParams& p = arguments.params;
  p.box = box_of(p.block);
  if (!dense && is_half(conv.input.scalar_type()) && knob.tau) {
    const auto box = box_of_several_pixels(conv);
    p.by_pixel = box.has_value();
    if (box) p.box = log2_block(*box);
  }
  const TileSize tile = arguments.choose(conv, dense, device.multiprocessors());
  ConvNorms norms;
  if (dense) {
    arguments.set_dense(knob);
  } else {
    const NormUse use = norm_use(conv, knob);
    norms = conv_norms<Element>(conv, input, weight, tile, use, device.stream());
    arguments.set(norms, use, knob, device.stream());
  }
  arguments.set_output(conv.output_sizes());
  // A copy of the weight is made in this call and so is not complete before it.
  p.weight_is_ready = conv.weight_is_ready && weight.is_same(conv.weight);
  return start<Element>(conv, arguments, input, weight, tile, device);
}

template <class Element>
ConvNormMaps find_norm_maps(const Convolution& conv) {
  const OnDevice device(conv.input);
  const Tensor input = readable_pixels(conv.input), weight = readable_pixels(conv.weight);
  const Arguments arguments(conv, input.options(), input.size(1));
  const ConvNorms norms = conv_norms<Element>(conv, input, weight, TileSize::kSmall,
                                              norm_use(conv, /*knob=*/{}), device.stream());
  return conv_norm_maps(conv, arguments.params, norms, device.stream());
}

Convolution with_norm_weight(Convolution conv) {
  if (!conv.norm_weight) conv.norm_weight = norm_map_of_weight(conv.weight, conv.block);
  return conv;
}

bool supports(const Convolution& conv, const Knob& knob) {
  const at::ScalarType dtype = conv.input.scalar_type();
  return (is_half(dtype) || (dtype == at::kFloat && conv.allow_tf32)) &&
         conv.shape.out_channels * conv.input.element_size() % kAlignment == 0 &&
         (skips_nothing(knob) ? sizes_fit_hopper(conv) : fits_boxes(conv));
}

// A residual of float32 would need two blocks for a box.
bool fuses_epilogue(const Convolution& conv) {
  return !conv.residual || is_half(conv.input.scalar_type());
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
                                       {.convolve = {&supports, &run},
                                        .norm_maps = &norm_maps,
                                        .fuses_epilogue = &fuses_epilogue});

}  // namespace
}  // namespace spamm::cuda
