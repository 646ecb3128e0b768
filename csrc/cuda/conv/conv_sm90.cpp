// Convolution without an im2col matrix, on Hopper: tensors to pointers.
//
// The kernels read and write channels-last memory with channels in multiples of 16 bytes. Anything
// else is copied once into that form; output channels must be such a multiple themselves. float32
// at full accuracy is split into split parts, in the pass that takes its norms.
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>

#include <algorithm>
#include <bit>

#include "conv/backend.h"
#include "conv/partial_blocks.h"
#include "cuda/conv/arguments_sm90.h"
#include "cuda/conv/channels_last.h"
#include "cuda/conv/launch_sm90.h"
#include "cuda/device.h"
#include "cuda/hopper.h"
#include "cuda/multiply/multiply.h"
#include "cuda/multiply/split.h"
#include "cuda/tau_argument.h"
#include "spamm/spamm.h"
#include "threshold.h"

namespace spamm::cuda {
namespace {

using at::Tensor;
using namespace kernels::conv;

int log2_of(int64_t power) { return std::countr_zero(static_cast<uint64_t>(power)); }

Log2Block log2_block(const PixelBlocks& blocks) {
  return {log2_of(blocks.edge[0]), log2_of(blocks.edge[1]), log2_of(blocks.edge[2])};
}

// Channels of a group: a block of 32 stands alone and is padded to 64.
int log2_group(const Block& block) { return std::max(log2_of(block.k), 6); }

// Whether a group's blocks of output and input channels are what the kernels have: 64 or 128, or 32
// where one block holds all channels.
bool takes_channels(const Block& block, int64_t out_channels, int64_t in_channels) {
  return (block.m >= 64 || out_channels <= block.m) && (block.k >= 64 || in_channels <= block.k);
}

// Whether the input's blocks can be loaded, and the output stored.
bool takes_layout(const Convolution& conv) {
  const bool is_float = conv.input.scalar_type() == at::kFloat;
  if (is_float && !conv.allow_tf32) {
    // Split parts come in blocks of 64 images x 64 channels; half empty ones do not pay.
    constexpr int64_t kLeastChannels = kernels::kSplitBlock / 2;
    return conv.blocks.edge[1] * conv.blocks.edge[2] == 1 &&
           conv.shape.in_channels >= kLeastChannels;
  }
  return (is_float || is_half(conv.input.scalar_type())) &&
         conv.shape.out_channels * conv.input.element_size() % kAlignment == 0 &&
         strides_fit(log2_block(conv.blocks), step(conv.shape.stride));
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
  if (given && conv.norm_weight && !large) {  // a launch less is worth more than tiles in turn
    return {conv.norm_weight->contiguous(), conv.norm_input->contiguous(), {}, nullptr};
  }
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
                                log2_of(conv.blocks.edge[0]), log2_group(conv.block), own_pixels,
                                sizeof(Element));
  }
  if (!conv.norm_weight) p.jobs[1] = weight_job(weight, conv.block, norms.weight);
  if (!given || !conv.norm_weight) {
    launch_pixel_norms<Element>(p, stream);
  } else {
    C10_CUDA_CHECK(cudaMemsetAsync(norms.next_tile, 0, sizeof(int), stream));
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
  const PartialBlockScale scale(conv.blocks, norm_weight.options());
  return threshold_from_knob(norm_weight, map, knob.tau, knob.valid_ratio, knob.max_error,
                             scale(map, 0));
}

// The norms that an output leaves for the next layer, where the convolution could not.
template <class Element>
void take_output_norms(const Tensor& output, const Tensor& norms, cudaStream_t stream) {
  PixelNormsParams p{};
  p.jobs[0] =
      pixel_norms_job(output.const_data_ptr(), output.size(0), output.size(2) * output.size(3),
                      output.size(1), log2_of(kLayerNormBlock), log2_of(kLayerNormBlock),
                      norms.mutable_data_ptr<float>(), sizeof(Element));
  launch_pixel_norms<Element>(p, stream);
}

// The kernel's parameters, but for the operands, and what they point to.
class Arguments {
 public:
  ConvParams params{};
  Tensor output;

  // Of an input as readable_pixels() gives it.
  Arguments(const Convolution& conv, const Tensor& input)
      : conv_(conv),
        output_options_(input.options()),
        bias_(conv.bias ? conv.bias->contiguous() : Tensor()) {
    params.shape = kernel_shape(conv.shape, input.size(1));
    params.block = log2_block(conv.blocks);
    params.log2_block_m = log2_of(conv.block.m);
    params.log2_block_k = log2_of(conv.block.k);
    params.bias = conv.bias ? bias_.const_data_ptr() : nullptr;
    params.relu = conv.relu;
  }

  // With the norms come the threshold and the output.
  void set(const Norms& norms, const Knob& knob, cudaStream_t stream) {
    params.norm_weight = norms.weight.const_data_ptr<float>();
    params.norm_input = {norms.pixels.const_data_ptr<float>(), true};
    params.next_tile = norms.next_tile;
    if (!knob.tau || conv_.blocks.edge[1] * conv_.blocks.edge[2] > 1) {
      norm_blocks_ = block_norms(conv_, params, norms, stream);
      params.norm_input = {norm_blocks_.const_data_ptr<float>(), false};
    }
    tau_ = tau_as(knob.tau ? *knob.tau : find_threshold(conv_, knob, norms.weight, norm_blocks_),
                  at::kFloat);
    params.tau = tau_argument<float>(tau_);
    const spamm::ConvShape& shape = conv_.shape;
    output = at::empty({shape.images, shape.out_channels, shape.output.height, shape.output.width},
                       output_options_, at::MemoryFormat::ChannelsLast);
    params.output = output.mutable_data_ptr();
  }

 private:
  const Convolution& conv_;
  at::TensorOptions output_options_;
  Tensor bias_, norm_blocks_;  // the last where a search wants them, or no shifted look-up will do
  Tensor tau_;
};

template <class Element>
TileSize choose_tile(const ConvParams& p, const Log2Block& box, int multiprocessors) {
  constexpr bool kResident = sizeof(Element) == 2;
  if (kResident ? takes_resident(p.shape, p.block) : p.shape.out_channels <= 64) {
    return TileSize::k64x256;
  }
  const Extent boxes = count(p.shape.output, box);
  const Tile tile = forced_tile().value_or(
      choose_conv_tile(p.shape.out_channels, int64_t{1} * boxes.images * boxes.rows * boxes.columns,
                       multiprocessors));
  return tile == Tile::kLarge ? TileSize::k128x256 : TileSize::k128x128;
}

template <class Element>
ConvolutionResult convolve(const Convolution& conv, const Knob& knob) {
  const OnDevice device(conv.input);
  const cudaStream_t stream = device.stream();
  const Tensor input = readable_pixels(conv.input), weight = readable_pixels(conv.weight);
  Arguments arguments(conv, input);
  ConvParams& p = arguments.params;
  const Log2Block box = box_of(p.block);
  const TileSize tile = choose_tile<Element>(p, box, device.multiprocessors());
  const Norms norms = take_norms<Element>(conv, input, weight, tile == TileSize::k128x256, stream);
  arguments.set(norms, knob, stream);
  // A copy made in this call is never ready.
  p.weight_is_ready = conv.weight_is_ready && weight.is_same(conv.weight);
  // Boxes that are the blocks of the next layer's norms leave these with the output.
  const bool computes_output_norms =
      conv.wants_output_norms && box.images == log2_of(kLayerNormBlock);
  Tensor left;
  if (conv.wants_output_norms) {
    left =
        at::empty(layer_norms_shape(conv.shape.images, conv.shape.output, conv.shape.out_channels),
                  norms.weight.options());
  }
  if (computes_output_norms) p.norm_output = left.mutable_data_ptr<float>();
  launch_conv<Element>(p, input.const_data_ptr(), weight.const_data_ptr(), tile,
                       device.multiprocessors(), stream);
  if (conv.wants_output_norms && !computes_output_norms)
    take_output_norms<Element>(arguments.output, left, stream);
  return {arguments.output, left};
}

// A channels-last tensor as a batch of matrices (images x channels), one for each pixel.
Tensor by_pixel(const Tensor& x) {
  const int64_t channels = x.size(1), pixels = x.size(2) * x.size(3);
  return x.as_strided({pixels, x.size(0), channels}, {channels, pixels * channels, 1});
}

// A float32 operand's split parts, which bring its norms in blocks of 64 x 64. The map of other
// blocks is taken before, and so is one that is given.
SplitTensor split(const Tensor& x, int split_parts, const Tensor& map, bool brings_norms) {
  return {x, /*k_dim=*/2, split_parts, brings_norms ? map : Tensor()};
}

// (blocks of rows of x[pixel], pixels, blocks of channels), of by_pixel().
Tensor pixel_map(const Tensor& x, int64_t rows, int64_t channels) {
  return norm_map(x, {rows, channels}).transpose(0, 1).contiguous();
}

ConvolutionResult convolve_split(const Convolution& conv, const Knob& knob) {
  const OnDevice device(conv.input);
  const Tensor input = readable_pixels(conv.input);
  const Tensor weight = readable_pixels(conv.weight, conv.block.k);
  const Tensor pixels = by_pixel(input), positions = by_pixel(weight);
  const auto empty = [&](at::IntArrayRef sizes) {
    return at::empty(sizes, input.options(), at::MemoryFormat::Contiguous);
  };
  // Maps, (blocks of images, pixels, groups) and (blocks of out_channels, positions, groups), as
  // the convolution wants them; where split parts bring them, those fill them.
  constexpr int64_t kEdge = kernels::kSplitBlock;
  const int64_t group = std::max(conv.block.k, kEdge), images = conv.blocks.edge[0];
  const bool input_given = takes_layer_norms(conv);
  const bool input_brings = !input_given && images == kEdge && group == kEdge;
  const bool weight_brings = !conv.norm_weight && conv.block.m == kEdge && conv.block.k == kEdge;
  const auto map_of = [&](const Tensor& x, int64_t rows, int64_t columns, bool brings) {
    return brings ? empty({blocks_of(x.size(1), rows), x.size(0), blocks_of(x.size(2), columns)})
                  : pixel_map(x, rows, columns);
  };
  const Tensor map_input =
      input_given ? conv.norm_input->contiguous() : map_of(pixels, images, group, input_brings);
  const Tensor map_weight =
      (conv.norm_weight ? conv.norm_weight->contiguous()
                        : map_of(positions, conv.block.m, conv.block.k, weight_brings))
          .view({blocks_of(weight.size(0), conv.block.m), positions.size(0), -1});
  const Tensor counter = at::empty({1}, input.options().dtype(at::kInt));

  constexpr int kSplitParts = 2;
  const SplitTensor a = split(positions, kSplitParts, map_weight.transpose(0, 1), weight_brings);
  const SplitTensor b = split(pixels, kSplitParts, map_input.transpose(0, 1), input_brings);
  kernels::SplitParams params[] = {a.params(), b.params()};
  params[0].zeroed = counter.mutable_data_ptr<int>();
  launch_split(params, 2, kSplitParts, device.stream());

  Arguments arguments(conv, input);
  arguments.set({.weight = map_weight.view({1, map_weight.size(0), -1}),
                 .pixels = map_input,
                 .own_pixels = {},
                 .next_tile = counter.mutable_data_ptr<int>()},
                knob, device.stream());
  arguments.params.a = a.source();
  arguments.params.b = b.source();
  launch_conv_f32x3(arguments.params, device.multiprocessors(), device.stream());
  return {arguments.output, Tensor()};
}

// The weight's norms are norm_map's, whatever PyTorch's setting is.
ConvolutionResult convolve_tf32(Convolution conv, const Knob& knob) {
  if (!conv.norm_weight) {
    const Tensor norms =
        pixel_map(by_pixel(readable_pixels(conv.weight)), conv.block.m, conv.block.k);
    conv.norm_weight = norms.view({1, norms.size(0), -1});
  }
  return convolve<float>(conv, knob);
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
         takes_channels(conv.block, shape.out_channels, shape.in_channels) && takes_layout(conv) &&
         shape.in_channels > 0 && std::max(shape.kernel.height, shape.kernel.width) < 256 &&
         std::max(shape.in_channels, shape.out_channels) < (1 << 20) &&
         // Coordinates, counts of pixels and numbers of norms are 32 bits wide.
         std::max({shape.input.height + 2 * shape.padding.height + window.height,
                   shape.input.width + 2 * shape.padding.width + window.width}) < kMost / 256 &&
         in_pixels * blocks_of(shape.in_channels, 64) *
                 blocks_of(shape.images, conv.blocks.edge[0]) <
             kMost &&
         in_pixels < kMost && out_pixels * blocks_of(shape.out_channels, 64) < kMost &&
         volume(conv.blocks.count()) * positions * blocks_of(shape.in_channels, 64) < kMost;
}

ConvolutionResult implicit_conv(const Convolution& conv, const Knob& knob) {
  switch (conv.input.scalar_type()) {
    case at::kHalf:
      return convolve<__half>(conv, knob);
    case at::kBFloat16:
      return convolve<__nv_bfloat16>(conv, knob);
    default:
      return conv.allow_tf32 ? convolve_tf32(conv, knob) : convolve_split(conv, knob);
  }
}

bool has_implicit_weight_norm(const Tensor& weight, int64_t groups, const Block& block) {
  return runs_on(weight) && groups == 1 && weight.numel() > 0 && weight.numel() < kMost &&
         is_half(weight.scalar_type()) && takes_channels(block, weight.size(0), weight.size(1));
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
