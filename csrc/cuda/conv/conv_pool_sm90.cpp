// Hopper's convolution of half types with max pooling: turns tensors into kernel parameters.
#include <c10/cuda/CUDAException.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/conv/arguments_sm90.h"
#include "cuda/conv/boxes_sm90.h"
#include "cuda/conv/channels_last.h"
#include "cuda/conv/launch_sm90.h"
#include "cuda/conv/sizes_sm90.h"
#include "cuda/device.h"
#include "cuda/operand.h"
#include "stage_range.h"

namespace spamm::cuda {
namespace {

using at::Tensor;
using namespace kernels::conv::sm90;

// The kernel has boxes of 64 images: fewer would leave them empty. Behind ReLU no zero has a sign,
// so that the largest value has the bits of torch's, the first of equal ones. few_channels.cuh is
// faster for less than 8 channels.
bool supports(const Convolution& conv, const Knob&) {
  const spamm::ConvShape& shape = conv.shape;
  const int64_t unit = kAlignment / conv.input.element_size();
  return is_half(conv.input.scalar_type()) && conv.activation == Activation::kRelu &&
         !conv.residual && shape.images >= kLayerNormBlock && shape.output.height % 2 == 0 &&
         shape.output.width % 2 == 0 && shape.in_channels >= unit &&
         shape.out_channels % unit == 0 && sizes_fit_hopper(conv);
}

// In dense mode, in boxes of one pixel. Output norms ask for them, too.
Convolution in_boxes_of_a_pixel(Convolution conv) {
  conv.wants_output_norms = true;
  return in_dense_mode(std::move(conv));
}

template <class Element>
Tensor convolve_and_pool(const Convolution& conv, const Knob& knob) {
  const StageRange stage(kMultiplyStage);
  const OnDevice device(conv.input);
  const Tensor input = readable_pixels(conv.input), weight = readable_pixels(conv.weight);
  const Convolution boxed = in_boxes_of_a_pixel(conv);
  Arguments arguments(boxed, input.options(), input.size(1));
  ConvParams& p = arguments.params;
  p.box = box_of(p.block);
  const TileSize tile = arguments.choose(conv, /*dense=*/true, device.multiprocessors());
  arguments.set_dense(knob);
  const auto sizes = conv.output_sizes();
  arguments.set_output({sizes[0], sizes[1], sizes[2] / 2, sizes[3] / 2});
  C10_CUDA_CHECK(launch_conv_pool<Element>(
      p, input.const_data_ptr(), weight.const_data_ptr(),
      {.tile = tile, .multiprocessors = device.multiprocessors(), .stream = device.stream()}));
  return arguments.output;
}

Tensor run(const Convolution& conv, const Knob& knob) {
  return conv.input.scalar_type() == at::kHalf ? convolve_and_pool<__half>(conv, knob)
                                               : convolve_and_pool<__nv_bfloat16>(conv, knob);
}

const Backends<DenseBackend> registered(at::kCUDA, Rank::kHopper,
                                        {.convolve_and_pool = {&supports, &run}});

}  // namespace
}  // namespace spamm::cuda
