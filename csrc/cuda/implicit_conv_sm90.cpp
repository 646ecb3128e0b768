// Convolution without an im2col matrix, on Hopper: tensors to pointers.
//
// The kernels read and write channels-last memory with channels in multiples of 16 bytes. Anything
// else is copied once into that form; the output's channels must be such a multiple themselves.
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>

#include <algorithm>
#include <bit>

#include "channels_last.h"
#include "conv_launch.h"
#include "device.h"
#include "hopper.h"
#include "implicit_conv.h"
#include "judge.h"
#include "tau.h"
#include "threshold.h"

namespace spamm::cuda {
namespace {

using at::Tensor;
using namespace kernels::conv;

constexpr int64_t kMost = (int64_t{1} << 31) - 1024;

int log2_of(int64_t power) { return std::countr_zero(static_cast<uint64_t>(power)); }

Log2Block log2_block(const PixelBlocks& blocks) {
  return {log2_of(blocks.edge[0]), log2_of(blocks.edge[1]), log2_of(blocks.edge[2])};
}

// Channels of a group: a block of 32 stands alone and is padded to 64.
int log2_group(const Block& block) { return std::max(log2_of(block.k), 6); }

Step2 step(const Size2& size) {
  return {static_cast<int>(size.height), static_cast<int>(size.width)};
}

Extent extent(int64_t images, const Size2& size) {
  return {static_cast<int>(images), static_cast<int>(size.height), static_cast<int>(size.width)};
}

// Of tensors as readable_pixels() gives them.
kernels::conv::ConvShape kernel_shape(const spamm::ConvShape& shape, const Tensor& input) {
  return {.input = extent(shape.images, shape.input),
          .output = extent(shape.images, shape.output),
          .channels = static_cast<int>(input.size(1)),
          .out_channels = static_cast<int>(shape.out_channels),
          .kernel = step(shape.kernel),
          .stride = step(shape.stride),
          .padding = step(shape.padding),
          .dilation = step(shape.dilation)};
}

// Whether a group's blocks of output and input channels are what the kernels have: 64 or 128, or 32
// where one block holds all channels.
bool takes_channels(at::ScalarType dtype, const Block& block, int64_t out_channels,
                    int64_t in_channels) {
  const bool is_half = dtype == at::kHalf || dtype == at::kBFloat16;
  return is_half && (block.m >= 64 || out_channels <= block.m) &&
         (block.k >= 64 || in_channels <= block.k);
}

bool runs_on(const Tensor& x) {
  return x.is_cuda() && has_hopper_kernels(check_device(x.device()));
}

PixelNormsJob weight_job(const Tensor& weight, const Block& block, const Tensor& norms) {
  return pixel_norms_job(weight.const_data_ptr(), weight.size(0), weight.size(2) * weight.size(3),
                         weight.size(1), log2_of(block.m), log2_group(block),
                         norms.mutable_data_ptr<float>());
}

std::array<int64_t, 3> weight_norms_shape(const Tensor& weight, const Block& block) {
  return {1, blocks_of(weight.size(0), block.m),
          weight.size(2) * weight.size(3) * blocks_of(weight.size(1), block.k)};
}

// Whether the input's norms are those that the layer before leaves.
bool takes_layer_norms(const Convolution& conv) {
  return conv.norm_input && conv.blocks.edge == Box{kLayerNormBlock, 1, 1} &&
         log2_group(conv.block) == log2_of(kLayerNormBlock);
}

// Norms as the kernel takes them, and what it counts tiles with.
struct Norms {
  Tensor weight;      // (1, MB, KB)
  Tensor pixels;      // of (image blocks, rows, columns, groups)
  Tensor own_pixels;  // owns the counter; `pixels` too, where they were not given
  int* next_tile;     // zero when the kernel begins, or null
};

// Takes those norms that are not given, all in one launch, which also sets the counter to zero.
template <class Element>
Norms take_norms(const Convolution& conv, const Tensor& input, const Tensor& weight, bool large,
                 cudaStream_t stream) {
  const auto options = input.options().dtype(at::kFloat);
  const bool given = takes_layer_norms(conv);
  const int64_t pixels = conv.shape.input.height * conv.shape.input.width;
  const int64_t groups = blocks_of(input.size(1), int64_t{1} << log2_group(conv.block));
  const int64_t count =
      given ? 0 : blocks_of(conv.shape.images, conv.blocks.edge[0]) * pixels * groups;
  Norms norms;
  norms.own_pixels = at::empty({count + 1}, options);
  norms.pixels = given ? conv.norm_input->contiguous() : norms.own_pixels;
  norms.weight = conv.norm_weight ? conv.norm_weight->contiguous()
                                  : at::empty(weight_norms_shape(conv.weight, conv.block), options);
  auto* const own_pixels = norms.own_pixels.mutable_data_ptr<float>();
  norms.next_tile = reinterpret_cast<int*>(own_pixels + count);

  PixelNormsParams p{};
  p.zeroed = norms.next_tile;
  if (!given) {
    p.jobs[0] = pixel_norms_job(input.const_data_ptr(), conv.shape.images, pixels, input.size(1),
                                log2_of(conv.blocks.edge[0]), log2_group(conv.block), own_pixels);
  }
  if (!conv.norm_weight) p.jobs[1] = weight_job(weight, conv.block, norms.weight);
  if (!given || !conv.norm_weight) {
    launch_pixel_norms<Element>(p, stream);
  } else if (large) {
    C10_CUDA_CHECK(cudaMemsetAsync(norms.next_tile, 0, sizeof(int), stream));
  } else {
    norms.next_tile = nullptr;  // a launch less is worth more than tiles in turn
  }
  return norms;
}

// Norms (pixel blocks, KB) of the im2col matrix, from those of pixels.
Tensor block_norms(const Convolution& conv, const ConvParams& p, const Norms& norms,
                   cudaStream_t stream) {
  const Tensor blocks =
      at::empty({volume(conv.blocks.count()), norms.weight.size(2)}, norms.weight.options());
  const int64_t positions = conv.shape.kernel.height * conv.shape.kernel.width;
  launch_block_norms({.pixel_norms = norms.pixels.const_data_ptr<float>(),
                      .shape = p.shape,
                      .block = p.block,
                      .blocks = count(p.shape.output, p.block),
                      .groups = static_cast<int>(norms.weight.size(2) / positions),
                      .norms = blocks.mutable_data_ptr<float>()},
                     stream);
  return blocks;
}

Tensor find_threshold(const Convolution& conv, const Knob& knob, const Tensor& norm_weight,
                      const Tensor& norm_blocks) {
  const Tensor map = norm_blocks.t().unsqueeze(0);
  const Judge judged(conv.blocks, norm_weight.options());
  return threshold_from_knob(norm_weight, map, knob.tau, knob.valid_ratio, knob.max_error,
                             judged(map, 0));
}

// The norms that an output leaves for the next layer, where the convolution could not.
template <class Element>
void take_output_norms(const Tensor& output, const Tensor& norms, cudaStream_t stream) {
  PixelNormsParams p{};
  p.jobs[0] = pixel_norms_job(
      output.const_data_ptr(), output.size(0), output.size(2) * output.size(3), output.size(1),
      log2_of(kLayerNormBlock), log2_of(kLayerNormBlock), norms.mutable_data_ptr<float>());
  launch_pixel_norms<Element>(p, stream);
}

template <class Element>
ConvolutionResult convolve(const Convolution& conv, const Knob& knob) {
  const OnDevice device(conv.input);
  const cudaStream_t stream = device.stream();
  const Tensor input = readable_pixels(conv.input), weight = readable_pixels(conv.weight);
  ConvParams p{};
  p.shape = kernel_shape(conv.shape, input);
  p.block = log2_block(conv.blocks);
  p.log2_block_m = log2_of(conv.block.m);
  p.log2_block_k = log2_of(conv.block.k);
  const Log2Block box = box_of(p.block);
  const Extent boxes = count(p.shape.output, box);
  const bool resident = takes_resident(p.shape, p.block);
  const bool large =
      !resident &&
      choose_conv_tile(p.shape.out_channels, int64_t{1} * boxes.images * boxes.rows * boxes.columns,
                       device.multiprocessors()) == Tile::kLarge;

  const Norms norms = take_norms<Element>(conv, input, weight, large, stream);
  p.norm_weight = norms.weight.const_data_ptr<float>();
  // Whatever took the norms that are given has waited for the weight, and lets no kernel start
  // before; a copy made here is another matter.
  p.weight_is_ready = conv.norm_weight && weight.is_same(conv.weight);
  p.norm_input = {norms.pixels.const_data_ptr<float>(), true};
  p.next_tile = norms.next_tile;
  Tensor norm_blocks;  // where a search wants them, or a shifted look-up does not do
  if (!knob.tau || conv.blocks.edge[1] * conv.blocks.edge[2] > 1) {
    norm_blocks = block_norms(conv, p, norms, stream);
    p.norm_input = {norm_blocks.const_data_ptr<float>(), false};
  }
  const Tensor tau = tau_as(
      knob.tau ? *knob.tau : find_threshold(conv, knob, norms.weight, norm_blocks), at::kFloat);
  p.tau = tau_argument<float>(tau);

  const Tensor output = at::empty({conv.shape.images, conv.shape.out_channels,
                                   conv.shape.output.height, conv.shape.output.width},
                                  input.options(), at::MemoryFormat::ChannelsLast);
  const Tensor bias = conv.bias ? conv.bias->contiguous() : Tensor();
  p.bias = conv.bias ? bias.const_data_ptr() : nullptr;
  p.relu = conv.relu;
  p.output = output.mutable_data_ptr();
  // Boxes that are the blocks of the next layer's norms leave these with the output.
  const bool leaves_norms = conv.leave_norms && box.images == log2_of(kLayerNormBlock);
  Tensor left;
  if (conv.leave_norms) {
    left =
        at::empty(layer_norms_shape(conv.shape.images, conv.shape.output, conv.shape.out_channels),
                  norms.weight.options());
  }
  if (leaves_norms) p.norm_output = left.mutable_data_ptr<float>();
  launch_conv<Element>(p, input.const_data_ptr(), weight.const_data_ptr(),
                       resident ? TileSize::k64x256Resident
                       : large  ? TileSize::k128x256
                                : TileSize::k128x128,
                       device.multiprocessors(), stream);
  if (conv.leave_norms && !leaves_norms) take_output_norms<Element>(output, left, stream);
  return {output, left};
}

}  // namespace

bool has_implicit_conv(const Convolution& conv) {
  const spamm::ConvShape& shape = conv.shape;
  if (!runs_on(conv.input)) return false;
  const int64_t positions = shape.kernel.height * shape.kernel.width;
  const int64_t in_pixels = shape.input.height * shape.input.width;
  const int64_t out_pixels = shape.images * shape.output.height * shape.output.width;
  const auto window = shape.window();
  return shape.groups == 1 && conv.block.n >= 64 &&
         takes_channels(conv.input.scalar_type(), conv.block, shape.out_channels,
                        shape.in_channels) &&
         shape.out_channels * conv.input.element_size() % kAlignment == 0 &&
         shape.in_channels > 0 && std::max(shape.kernel.height, shape.kernel.width) < 256 &&
         std::max(shape.in_channels, shape.out_channels) < (1 << 20) &&
         // Coordinates, counts of pixels and numbers of norms are 32 bits wide.
         std::max({shape.input.height + 2 * shape.padding.height + window.height,
                   shape.input.width + 2 * shape.padding.width + window.width}) < kMost / 256 &&
         in_pixels * blocks_of(shape.in_channels, 64) *
                 blocks_of(shape.images, conv.blocks.edge[0]) <
             kMost &&
         in_pixels < kMost && out_pixels * blocks_of(shape.out_channels, 64) < kMost &&
         volume(conv.blocks.count()) * positions * blocks_of(shape.in_channels, 64) < kMost &&
         strides_fit(log2_block(conv.blocks), step(shape.stride));
}

ConvolutionResult implicit_conv(const Convolution& conv, const Knob& knob) {
  return conv.input.scalar_type() == at::kHalf ? convolve<__half>(conv, knob)
                                               : convolve<__nv_bfloat16>(conv, knob);
}

bool has_implicit_weight_norm(const Tensor& weight, int64_t groups, const Block& block) {
  return runs_on(weight) && groups == 1 && weight.numel() > 0 && weight.numel() < kMost &&
         takes_channels(weight.scalar_type(), block, weight.size(0), weight.size(1));
}

Tensor implicit_weight_norm(const Tensor& weight, const Block& block) {
  const OnDevice device(weight);
  const Tensor taken = readable_pixels(weight);
  const Tensor norms = at::empty(weight_norms_shape(weight, block),
                                 weight.options().dtype(at::kFloat), at::MemoryFormat::Contiguous);
  PixelNormsParams p{};
  p.jobs[1] = weight_job(taken, block, norms);
  const auto launch = weight.scalar_type() == at::kHalf ? launch_pixel_norms<__half>
                                                        : launch_pixel_norms<__nv_bfloat16>;
  launch(p, device.stream());
  return norms;
}

}  // namespace spamm::cuda
