// The parameters of a Hopper convolution's kernel: norms first, then the threshold from them.
#include "cuda/conv/arguments_sm90.h"

#include <ATen/ops/empty.h>

#include <algorithm>

#include "conv/partial_blocks.h"
#include "cuda/conv/channels_last.h"
#include "cuda/conv/sizes_sm90.h"
#include "cuda/device.h"
#include "cuda/hopper.h"
#include "cuda/tau_argument.h"
#include "threshold.h"

namespace spamm::cuda {

using at::Tensor;

namespace {

Tensor find_threshold(const Convolution& conv, const Knob& knob, const Tensor& norm_weight,
                      const Tensor& norm_blocks) {
  const Tensor map = norm_blocks.t().unsqueeze(0);
  const PartialBlockScale scale(conv.blocks, norm_weight.options());
  return threshold_from_knob(norm_weight, map, knob, scale(map, 0));
}

// The residual, as one image if all images have the same memory, and boxes lie in one image, as
// those of deviations do.
Tensor once_if_shared(const Convolution& conv) {
  const Tensor& residual = *conv.residual;
  const bool is_shared = conv.is_deviation && conv.blocks.edge[0] == 1 && residual.stride(0) == 0 &&
                         residual.size(0) == conv.shape.images;
  return is_shared ? residual.narrow(0, 0, 1) : residual;
}

}  // namespace

bool sizes_fit_hopper(const Convolution& conv) {
  const spamm::ConvShape& shape = conv.shape;
  if (!has_hopper_kernels(check_device(conv.input.device()))) return false;
  const int64_t positions = shape.kernel.height * shape.kernel.width;
  const int64_t in_pixels = shape.input.height * shape.input.width;
  const int64_t out_pixels = shape.images * shape.output.height * shape.output.width;
  const auto window = shape.window();
  return shape.groups == 1 && shape.in_channels > 0 && in_pixels > 0 &&
         std::max(shape.kernel.height, shape.kernel.width) < 256 &&
         std::max(shape.in_channels, shape.out_channels) < (1 << 20) &&
         // Coordinates and numbers of pixels and norms are 32 bits wide.
         std::max({shape.input.height + 2 * shape.padding.height + window.height,
                   shape.input.width + 2 * shape.padding.width + window.width}) < kMost / 256 &&
         in_pixels * blocks_of(shape.in_channels, 64) *
                 blocks_of(shape.images, conv.blocks.edge[0]) <
             kMost &&
         in_pixels < kMost && out_pixels * blocks_of(shape.out_channels, 64) < kMost &&
         volume(conv.blocks.count()) * positions * blocks_of(shape.in_channels, 64) < kMost;
}

bool fits_hopper(const Convolution& conv) {
  return conv.block.n >= 64 &&
         supports_channels(conv.block, conv.shape.out_channels, conv.shape.in_channels) &&
         sizes_fit_hopper(conv);
}

Arguments::Arguments(const Convolution& conv, const at::TensorOptions& options, int64_t channels)
    : conv_(conv),
      output_options_(options),
      bias_(conv.bias ? conv.bias->contiguous() : Tensor()),
      residual_(conv.residual ? readable_pixels(once_if_shared(conv)) : Tensor()),
      base_(conv.base ? readable_pixels(*conv.base) : Tensor()) {
  params.shape = kernel_shape(conv.shape, channels);
  params.block = log2_block(conv.blocks.edge);
  params.log2_block_m = log2_of(conv.block.m);
  params.log2_block_k = log2_of(conv.block.k);
  params.bias = conv.bias ? bias_.const_data_ptr() : nullptr;
  params.residual = conv.residual ? residual_.const_data_ptr() : nullptr;
  params.residual_is_shared = conv.residual && residual_.size(0) < conv.residual->size(0);
  if (conv.base) {
    params.base = base_.const_data_ptr();
    params.base_activation = conv.activation;
  } else {
    params.activation = conv.activation;
  }
}

void Arguments::set(const ConvNorms& norms, const Knob& knob, cudaStream_t stream) {
  params.norm_weight = norms.weight.const_data_ptr<float>();
  params.norm_input = {norms.pixels.const_data_ptr<float>(), true};
  params.next_tile = norms.next_tile;
  params.by_strips = runs_by_strips(conv_, knob);
  if (takes_block_norms(conv_, knob)) {
    norm_blocks_ = im2col_block_norms(conv_, params, norms, stream);
    params.norm_input = {norm_blocks_.const_data_ptr<float>(), false};
  }
  tau_ = tau_as(knob.tau ? *knob.tau : find_threshold(conv_, knob, norms.weight, norm_blocks_),
                at::kFloat);
  params.tau = tau_argument<float>(tau_);
}

void Arguments::set_dense(const Knob& knob) {
  if (conv_.norm_weight) {
    norm_weight_ = conv_.norm_weight->contiguous();
    params.norm_weight = norm_weight_.const_data_ptr<float>();
  }
  tau_ = *knob.tau;
  params.tau = tau_argument<float>(tau_);
}

void Arguments::set_output(at::IntArrayRef sizes) {
  output = at::empty(sizes, output_options_, at::MemoryFormat::ChannelsLast);
  params.output = output.mutable_data_ptr();
}

}  // namespace spamm::cuda
