// The parameters of a Hopper convolution's kernel: norms first, then the threshold from them.
#include "cuda/conv/arguments_sm90.h"

#include <ATen/ops/empty.h>

#include <algorithm>

#include "conv/partial_blocks.h"
#include "cuda/conv/channels_last.h"
#include "cuda/conv/sizes_sm90.h"
#include "cuda/device.h"
#include "cuda/forced_segments.h"
#include "cuda/forced_tile.h"
#include "cuda/heuristics.h"
#include "cuda/hopper.h"
#include "cuda/tau_argument.h"
#include "threshold.h"

namespace spamm::cuda {

using at::Tensor;
using namespace kernels::conv::sm90;

namespace {

Tensor find_threshold(const Convolution& conv, const Knob& knob, const Tensor& norm_weight,
                      const Tensor& norm_blocks) {
  const Tensor map = norm_blocks.t().unsqueeze(0);
  const PartialBlockScale scale(conv.blocks, norm_weight.options());
  return threshold_from_knob(norm_weight, map, knob, scale(map, 0));
}

// The logarithm of the number of segments of a tile's steps.
int choose_log2_segments(const Convolution& conv, bool dense, int multiprocessors) {
  // Pixel blocks of one image promise that no bit of an image depends on its batch.
  const int64_t block = conv.blocks.edge[0];
  if (block == 1 || !is_half(conv.input.scalar_type())) return 0;
  const spamm::ConvShape& shape = conv.shape;
  // Missing images change no bit where images are skipped by the block.
  const int64_t images = dense ? conv.whole_images : blocks_of(conv.whole_images, block) * block;
  static_assert(kMostSegments == 1 << kLog2MostSegments);
  return log2_of(choose_conv_segments(
      shape.out_channels, images * shape.output.height * shape.output.width,
      shape.kernel.height * shape.kernel.width * blocks_of(shape.in_channels, 64), multiprocessors,
      forced_segments()));
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

bool fits_boxes(const Convolution& conv) {
  return strides_fit(log2_block(conv.blocks.edge), size2(conv.shape.stride)) && fits_hopper(conv);
}

Arguments::Arguments(const Convolution& conv, const at::TensorOptions& options, int64_t channels)
    : conv_(conv),
      output_options_(options),
      bias_(conv.bias ? conv.bias->contiguous() : Tensor()),
      residual_(conv.residual ? readable_pixels(*conv.residual) : Tensor()) {
  params.shape = kernel_shape(conv.shape, channels);
  params.block = log2_block(conv.blocks.edge);
  params.log2_block_m = log2_of(conv.block.m);
  params.log2_block_k = log2_of(conv.block.k);
  params.bias = conv.bias ? bias_.const_data_ptr() : nullptr;
  params.residual = conv.residual ? residual_.const_data_ptr() : nullptr;
  params.activation = conv.activation;
}

void Arguments::set(const ConvNorms& norms, const NormUse& use, const Knob& knob,
                    cudaStream_t stream) {
  params.norm_weight = norms.weight.const_data_ptr<float>();
  params.norm_input = {norms.pixels.const_data_ptr<float>(), true};
  params.next_tile = norms.next_tile;
  if (use.by_block) {
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

TileSize Arguments::choose(const Convolution& conv, bool dense, int multiprocessors) {
  params.log2_segments = choose_log2_segments(conv, dense, multiprocessors);
  const Extent grid = count(params.shape.output, params.box);
  const int64_t boxes = int64_t{1} * grid.images * grid.rows * grid.columns;
  if (params.by_pixel) return choose_by_pixel_tile(conv.shape.out_channels, boxes, multiprocessors);
  const ConvKernel kernel =
      choose_conv_kernel(conv.input.scalar_type(), conv.allow_tf32, /*hopper=*/true);
  return choose_conv_tile_sm90(kernel, conv.shape.out_channels, boxes, multiprocessors,
                               dense && params.log2_segments == 0, forced_tile());
}

void Arguments::set_output(at::IntArrayRef sizes) {
  output = at::empty(sizes, output_options_, at::MemoryFormat::ChannelsLast);
  params.output = output.mutable_data_ptr();
}

}  // namespace spamm::cuda
