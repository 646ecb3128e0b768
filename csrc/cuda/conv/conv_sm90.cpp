// Hopper's convolution of half types, and of float32 as TF32: turns tensors into kernel parameters.
//
// The kernels read and write channels-last memory in which the channels of a pixel are a multiple
// of 16 bytes. Other inputs are copied. The output's channels must be such a multiple.

#include "conv/backend.h"
#include "cuda/conv/arguments_sm90.h"
#include "cuda/conv/launch.h"
#include "cuda/device.h"
#include "cuda/operand.h"
#include "stage_range.h"
#include "threshold.h"

namespace spamm::cuda {
namespace {

using at::Tensor;
using namespace kernels::conv::sm90;

ConvolutionResult convolve_boxes(const Convolution& conv, const Knob& knob) {
  const OnDevice device(conv.input);
  const bool dense = skips_nothing(knob);
  const Convolution boxed = dense ? in_dense_mode(conv) : conv;
  Arguments arguments(boxed, readable_pixels(conv.input), readable_pixels(conv.weight));
  ConvParams& p = arguments.params;
  if (!dense && knob.tau) {
    const auto box = box_of_several_pixels(conv);
    p.by_pixel = box.has_value();
    if (box) p.box = log2_block(*box);
  }
  if (dense) {
    arguments.choose(conv, /*use=*/nullptr, device.multiprocessors());
    arguments.set_dense(knob);
  } else {
    const NormUse use = norm_use(conv, knob);
    arguments.choose(conv, &use, device.multiprocessors());
    arguments.take_norms(use, knob, device.stream());
  }
  arguments.set_output(conv.output_sizes());

  const StageRange stage(kMultiplyStage);
  Tensor norms;
  if (conv.wants_output_norms) norms = empty_layer_norms(conv);
  // If a box covers the images of its output norms, the kernel computes them.
  const bool in_kernel = norms.defined() && (p.box.images == log2_of(kLayerNormBlock) ||
                                             (p.by_pixel && is_half(conv.input.scalar_type()) &&
                                              takes_norms_of_pixels(p.box, conv.shape.images)));
  if (in_kernel) p.norm_output = norms.mutable_data_ptr<float>();
  const auto launch = of_type(conv.input.scalar_type(), launch_conv<__half>,
                              launch_conv<__nv_bfloat16>, launch_conv<float>);
  C10_CUDA_CHECK(launch(p, arguments.input.const_data_ptr(), arguments.weight.const_data_ptr(),
                        arguments.launch(device.multiprocessors(), device.stream())));
  if (norms.defined() && !in_kernel) output_norms(arguments.output, norms, device.stream());
  return {arguments.output, norms};
}

bool supports(const Convolution& conv, const Knob& knob) {
  return is_of_hopper_type(conv) &&
         conv.shape.out_channels * conv.input.element_size() % kAlignment == 0 &&
         (skips_nothing(knob) ? sizes_fit_hopper(conv) : fits_boxes(conv));
}

// A residual of float32 would need two blocks for a box.
bool adds_residual(const Convolution& conv) {
  return !conv.residual || is_half(conv.input.scalar_type());
}

ConvolutionResult run(const Convolution& conv, const Knob& knob) {
  const bool is_float = conv.input.scalar_type() == at::kFloat;
  if (!is_float || skips_nothing(knob) || conv.norm_weight) return convolve_boxes(conv, knob);
  Convolution with_norms = conv;  // norm_map's for TF32
  with_norms.norm_weight = norm_map_of_weight(conv.weight, conv.block);
  return convolve_boxes(with_norms, knob);
}

// ---- With max pooling ---------------------------------------------------------------------------

// The kernel has boxes of 64 images: fewer would leave them empty. Behind ReLU no zero has a sign,
// so that the largest value has the bits of torch's, the first of equal ones. few_channels.cuh is
// faster for less than 8 channels. Where cuDNN's convolution is the faster one, a pool follows it:
// the result has the bits of both calls.
bool pools(const Convolution& conv, const Knob&) {
  const spamm::ConvShape& shape = conv.shape;
  const int64_t unit = kAlignment / conv.input.element_size();
  return is_half(conv.input.scalar_type()) && conv.activation == Activation::kRelu &&
         !conv.residual && shape.images >= kLayerNormBlock && shape.output.height % 2 == 0 &&
         shape.output.width % 2 == 0 && shape.in_channels >= unit &&
         shape.out_channels % unit == 0 && sizes_fit_hopper(conv) &&
         Backends<UnskippedBackend>::find(at::kCUDA)->own_pays(conv);
}

Tensor run_and_pool(const Convolution& conv, const Knob& knob) {
  const StageRange stage(kMultiplyStage);
  const OnDevice device(conv.input);
  Convolution wanted = conv;
  wanted.wants_output_norms = true;  // asks for boxes of one pixel, too
  const Convolution boxed = in_dense_mode(wanted);
  Arguments arguments(boxed, readable_pixels(conv.input), readable_pixels(conv.weight));
  arguments.choose(conv, /*use=*/nullptr, device.multiprocessors());
  arguments.set_dense(knob);
  const auto sizes = conv.output_sizes();
  arguments.set_output({sizes[0], sizes[1], sizes[2] / 2, sizes[3] / 2});
  const auto launch = conv.input.scalar_type() == at::kHalf ? launch_conv_pool<__half>
                                                            : launch_conv_pool<__nv_bfloat16>;
  C10_CUDA_CHECK(launch(arguments.params, arguments.input.const_data_ptr(),
                        arguments.weight.const_data_ptr(),
                        arguments.launch(device.multiprocessors(), device.stream())));
  return arguments.output;
}

const Backends<ConvBackend> of_boxes(at::kCUDA, Rank::kHopper,
                                     {.convolve = {&supports, &run},
                                      .fuses_epilogue = &adds_residual});
const Backends<DenseBackend> pooling(at::kCUDA, Rank::kHopper,
                                     {.convolve_and_pool = {&pools, &run_and_pool}});

}  // namespace
}  // namespace spamm::cuda
