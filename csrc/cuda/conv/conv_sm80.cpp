// The portable convolutions without an im2col matrix: parameters from tensors. Dense ones by cuDNN.
#include <c10/util/accumulate.h>

#include <array>
#include <bit>

#include "conv/backend.h"
#include "cuda/conv/arguments_sm90.h"
#include "cuda/conv/launch.h"
#include "cuda/device.h"
#include "cuda/heuristics.h"
#include "cuda/multiply/multiply.h"
#include "cuda/norm_map/norm_map.h"
#include "cuda/operand.h"
#include "stage_range.h"
#include "threshold.h"

namespace spamm::cuda {
namespace {

using at::Tensor;
using kernels::Im2colMatrix, kernels::ThinParams;

// Channels of a group in the result of readable_pixels().
int64_t group_channels(const Convolution& conv) {
  const int64_t unit = kAlignment / conv.input.element_size();
  return blocks_of(conv.shape.group_in_channels(), unit) * unit;
}

// The im2col matrix of `input`, a result of readable_pixels(). Where it is thin, it is one matrix,
// whose blocks of channels are those of all groups.
Im2colMatrix im2col_matrix(const Convolution& conv, const Tensor& input, bool thin) {
  const ConvShape& shape = conv.shape;
  const Box blocks = conv.blocks.count();
  Im2colMatrix m{};
  m.data = input.const_data_ptr();
  m.images = static_cast<int>(shape.images);
  m.groups = static_cast<int>(shape.groups);
  m.channels = static_cast<int>(group_channels(conv));
  m.input = size2(shape.input), m.output = size2(shape.output);
  m.stride = size2(shape.stride), m.padding = size2(shape.padding);
  m.dilation = size2(shape.dilation);
  m.kernel_columns = static_cast<int>(shape.kernel.width);
  m.positions = static_cast<int>(shape.kernel_positions());
  m.log2_images = log2_of(conv.blocks.edge[0]);
  m.log2_rows = log2_of(conv.blocks.edge[1]);
  m.log2_columns = log2_of(conv.blocks.edge[2]);
  m.image_blocks = static_cast<int>(blocks[0]);
  m.blocks = {static_cast<int>(blocks[1]), static_cast<int>(blocks[2])};
  const int64_t depth = blocks_of(shape.group_in_channels(), conv.block.k) * conv.block.k;
  m.position_depth = static_cast<int>(depth);
  if (thin) {
    m.position_depth *= m.groups;
    m.groups = 1;
    m.channels = static_cast<int>(input.size(1));
  }
  m.set_divisors();
  return m;
}

// The im2col matrix of the same input for a 1 x 1 kernel. Its blocks are pixels of several images:
// of a single one those that exist, but not less than norm_map's threads share. `line_bytes`: of an
// image's channels in a block.
Im2colMatrix pixel_matrix(Im2colMatrix m, int64_t line_bytes) {
  constexpr uint64_t kLeastBytes = 2048;
  if (m.image_blocks == 1) {
    const uint64_t images = std::max<uint64_t>(m.images, kLeastBytes / line_bytes);
    m.log2_images = std::min(m.log2_images, static_cast<int>(std::bit_width(images - 1)));
  }
  m.output = m.input, m.blocks = m.input;
  m.stride = m.dilation = {1, 1}, m.padding = {0, 0};
  m.kernel_columns = m.positions = 1;
  m.set_divisors();
  return m;
}

// The parameters of the kernels for thin blocks.
template <class Norm>
ThinParams<Norm> thin_params(const Convolution& conv, const kernels::ConvSm80Params<Norm>& p,
                             const Im2colMatrix& matrix) {
  ThinParams<Norm> thin{};
  thin.conv = p;
  thin.conv.pixels = matrix;
  thin.conv.log2_block_k = log2_of(conv.block.k);
  thin.groups = static_cast<int>(conv.shape.groups);
  thin.channels = static_cast<int>(conv.shape.group_in_channels());
  thin.depth_blocks = static_cast<int>(blocks_of(thin.channels, conv.block.k));
  const bool are_images = matrix.log2_rows + matrix.log2_columns == 0;
  const int edge = 1 << matrix.log2_block();
  thin.pixels = are_images ? std::min(edge, matrix.images) : edge;
  return thin;
}

template <template <class> class Params, class Norm, class Stage>
void launch(const Params<Norm>& params, at::ScalarType dtype, Stage stage, const OnDevice& device) {
  with_element(dtype, [&]<class Element>(Element) {
    if constexpr (std::is_same_v<Element, double> == std::is_same_v<Norm, double>) {
      C10_CUDA_CHECK(launch_thin<Element>(params, stage, device.stream()));
    }
  });
}

// The norms (groups, pixel blocks, K / k) of an im2col matrix. Ones do where nothing is skipped.
template <class Norm>
Tensor im2col_norms(const Im2colMatrix& matrix, const Convolution& conv, const Knob& knob,
                    bool thin, const OnDevice& device) {
  const StageRange stage(kNormMapStage);
  const at::ScalarType dtype = conv.input.scalar_type();
  const std::array sizes = {int64_t{matrix.groups}, int64_t{matrix.block_count()},
                            matrix.depth() / conv.block.k};
  const auto options = conv.input.options().dtype(norm_dtype(dtype));
  if (skips_nothing(knob)) return at::ones(sizes, options);
  const Tensor norms = at::empty(sizes, options);
  if (thin) {
    ThinParams<Norm> params = thin_params<Norm>(conv, {}, matrix);
    params.norms = norms.mutable_data_ptr<Norm>();
    launch(params, dtype, ThinStage::kNorms, device);
  } else {
    launch_im2col_norms<Norm>({matrix, log2_of(conv.block.k), norms.mutable_data_ptr<Norm>()},
                              dtype, device.stream());
  }
  return norms;
}

// Tells whether the output norms of the previous layer are the norms of this convolution's blocks.
bool can_use_layer_norms(const Convolution& conv) {
  const int64_t channels = conv.shape.in_channels;
  return conv.norm_input && conv.shape.groups == 1 &&
         conv.norm_input->scalar_type() == norm_dtype(conv.input.scalar_type()) &&
         conv.blocks.edge == Box{kLayerNormBlock, 1, 1} &&
         (conv.block.k == kLayerNormBlock || channels <= std::min(conv.block.k, kLayerNormBlock));
}

// The norms that a kernel looks up by pixel.
template <class Norm>
Tensor pixel_norms(const Im2colMatrix& matrix, const Convolution& conv, const Knob& knob, bool thin,
                   const OnDevice& device) {
  if (can_use_layer_norms(conv)) return conv.norm_input->contiguous();
  return im2col_norms<Norm>(pixel_matrix(matrix, conv.block.k * conv.input.element_size()), conv,
                            knob, thin, device);
}

// Tells whether rows of the im2col matrix can be packed (conv/sm80/packed.cuh) and are much fewer.
bool packs(const Convolution& conv, const Knob& knob) {
  const Box& edge = conv.blocks.edge;
  return knob.tau && edge[1] * edge[2] == 1 &&
         8 * conv.shape.images <= 7 * conv.blocks.count()[0] * edge[0];
}

HeldConv held_size(const Convolution& conv) {
  const ConvShape& shape = conv.shape;
  const Box blocks = conv.blocks.count();
  const bool of_one = conv.blocks.edge[0] == 1;  // an image does not depend on its batch
  return {.images = of_one ? 1 : shape.images,
          .pixels = shape.output.height * shape.output.width,
          .pixels_of_blocks = (of_one ? 1 : blocks[0]) * blocks[1] * blocks[2] * conv.block.n,
          .in_pixels = shape.input.height * shape.input.width,
          .positions = shape.kernel_positions(),
          .groups = shape.groups,
          .in_channels = shape.group_in_channels(),
          .out_channels = shape.group_out_channels(),
          .block_m = conv.block.m,
          .block_k = conv.block.k};
}

template <class Norm>
Tensor convolve(const Convolution& conv, const Knob& knob, HeldWay way) {
  const OnDevice device(conv.input);
  const ConvShape& shape = conv.shape;
  const bool depthwise = way == HeldWay::kDepthwise, thin = way == HeldWay::kThin;
  Tensor input, weight, norm_a;
  kernels::ConvSm80Params<Norm> p{};
  if (thin || depthwise) {
    input = thin ? readable_pixels(conv.input, 1) : readable_pixels(conv.input);
    // Groups of several channels are read by strides; a copy if none leads through the window.
    const bool is_group = depthwise && shape.group_in_channels() > 1;
    weight = is_group ? conv.weight.flatten(2)
                      : (thin ? conv.weight.permute({2, 3, 1, 0}) : conv.weight).contiguous();
    if (thin || is_group || conv.norm_weight) norm_a = weight_norms(conv).contiguous();
    p.weight.data = weight.const_data_ptr();
  } else {
    input = readable_pixels(conv.input);
    weight = weight_matrix(conv.weight, shape.groups, conv.block.k);
    norm_a = conv.norm_weight ? conv.norm_weight->contiguous()
                              : norm_map(weight, {conv.block.m, conv.block.k});
    if (!reads_along(weight, 2, 1)) weight = aligned_copy(weight);
    p.weight = operand(weight, 2);
  }
  p.pixels = im2col_matrix(conv, input, thin || depthwise);

  // A search needs the norms of all blocks. Otherwise, if a block is one pixel of several images,
  // the kernel looks its norms up by pixel.
  p.norm_pixels.per_pixel = knob.tau && conv.blocks.edge[1] * conv.blocks.edge[2] == 1;
  Tensor norms;
  if (!depthwise) {
    norms = p.norm_pixels.per_pixel ? pixel_norms<Norm>(p.pixels, conv, knob, thin, device)
                                    : im2col_norms<Norm>(p.pixels, conv, knob, thin, device);
    p.norm_pixels.norms = norms.const_data_ptr<Norm>();
  }
  p.packed = !thin && packs(conv, knob);
  const auto find_threshold = [&] {
    const int64_t blocks = volume(conv.blocks.count());
    const Tensor norm_b = thin ? norms.view({blocks, shape.kernel_positions(), shape.groups, -1})
                                     .permute({2, 1, 3, 0})
                                     .reshape({shape.groups, -1, blocks})
                               : norms.mT();
    return threshold_from_knob(norm_a, norm_b, knob,
                               PartialBlockScale(conv.blocks, norm_a.options())(norm_b, 0));
  };
  const Threshold tau(knob.tau ? *knob.tau : find_threshold(), norm_dtype(input.scalar_type()));
  p.tau = tau.argument<Norm>();

  p.norm_weight = norm_a.defined() ? norm_a.const_data_ptr<Norm>() : nullptr;
  p.out_channels = static_cast<int>(shape.group_out_channels());
  p.log2_block_m = log2_of(conv.block.m);
  p.log2_block_k = log2_of(conv.block.k);
  const Tensor bias = conv.bias ? conv.bias->contiguous() : Tensor();
  p.bias = conv.bias ? bias.const_data_ptr() : nullptr;
  p.relu = conv.activation == Activation::kRelu;
  const Tensor output =
      at::empty(conv.output_sizes(), conv.input.options(), at::MemoryFormat::ChannelsLast);
  p.output = output.mutable_data_ptr();

  const StageRange stage(kMultiplyStage);
  if (depthwise) {
    const auto most_bytes = static_cast<int>(device.properties().sharedMemPerBlockOptin);
    kernels::DepthwiseParams<Norm> of{};
    of.conv = p, of.channels = static_cast<int>(shape.in_channels);
    of.log2_width = log2_of(shape.group_in_channels());
    std::copy_n(weight.strides().begin(), 3, of.weight_steps);
    choose_depthwise(of, input.element_size(), most_bytes, device.multiprocessors());
    launch(of, conv.input.scalar_type(), most_bytes, device);
    return output;
  }
  if (thin) {
    launch(thin_params(conv, p, p.pixels), conv.input.scalar_type(), ThinStage::kMultiply, device);
    return output;
  }
  const Kernel kernel =
      choose_kernel(conv.input.scalar_type(), conv.block, conv.allow_tf32, /*hopper=*/false);
  const int64_t pixels = volume(conv.blocks.count()) * conv.block.n;
  const auto convolve = [&]() -> Convolve<Norm>* {
    if constexpr (std::is_same_v<Norm, double>) {
      return conv_sm80_f64;
    } else {
      return kernel == Kernel::kSm80F16    ? conv_sm80_f16
             : kernel == Kernel::kSm80Bf16 ? conv_sm80_bf16
             : kernel == Kernel::kSm80Tf32 ? conv_sm80_tf32
                                           : conv_sm80_f32;
    }
  }();
  const kernels::Launch how = {
      .tile = p.packed ? choose_packed_tile(kernel, held_size(conv), device.multiprocessors(),
                                            forced_tile())
                             .tile
                       : choose_conv_tile_sm80(kernel, shape.groups, pixels, p.out_channels,
                                               device.multiprocessors(), forced_tile()),
      .multiprocessors = device.multiprocessors(),
      .stream = device.stream()};
  C10_CUDA_CHECK(convolve(p, how));
  return output;
}

// Tells whether numbers of 32 bits count everything. `thin`: an output has a thread.
bool sizes_fit(const Convolution& conv, bool thin) {
  const ConvShape& shape = conv.shape;
  const auto window = shape.window();
  const int64_t pixels = volume(conv.blocks.count()) * conv.block.n;
  const int64_t depth_blocks = blocks_of(shape.group_in_channels(), conv.block.k);
  return std::max({shape.images, shape.in_channels, shape.out_channels, shape.input.height,
                   shape.input.width, shape.padding.height, shape.padding.width}) < (1 << 19) &&
         std::max({window.height, window.width, shape.stride.height, shape.stride.width}) <
             (1 << 19) &&
         shape.images * (shape.input.height + 2 * shape.padding.height) *
                 (shape.input.width + 2 * shape.padding.width) <
             kMost &&
         (thin ? shape.out_channels : 1) * pixels < kMost &&
         shape.kernel_positions() * depth_blocks * conv.block.k < kMost &&
         std::max(shape.kernel_positions() * volume(conv.blocks.count()),
                  blocks_of(shape.images, conv.blocks.edge[0]) * shape.input.height *
                      shape.input.width) *
                 shape.groups * depth_blocks <
             kMost;
}

// The channels of each group start at a multiple of 16 bytes.
bool are_groups_aligned(const Convolution& conv) {
  return conv.shape.groups == 1 || group_channels(conv) == conv.shape.group_in_channels();
}

bool supports(const Convolution& conv, const Knob&) {
  const int64_t channels = conv.shape.group_in_channels();
  const bool hopper = has_hopper_kernels(check_device(conv.input.device()));
  const auto kernel = choose_kernel(conv.input.scalar_type(), conv.block, conv.allow_tf32, hopper);
  return channels > 0 && !im2col_matrix_pays(kernel, conv.block, channels) &&
         are_groups_aligned(conv) && sizes_fit(conv, /*thin=*/false);
}

// Tells whether depthwise.cuh takes groups as narrow, half types of several channels. It takes
// pairs of channels but for float64, and holds a window of all images.
bool is_narrow(const Convolution& conv, int64_t most_bytes) {
  const ConvShape& shape = conv.shape;
  const int64_t bytes = conv.input.element_size(), width = shape.group_in_channels();
  const bool is_taken =
      width == 1 ? bytes == 8 || shape.groups % 2 == 0
                 : bytes == 2 && shape.groups > 1 && (width == 4 || width == 8 || width == 16);
  return is_taken && shape.out_channels == shape.in_channels &&
         conv.blocks.edge[0] == conv.block.n &&
         kernels::depthwise_bytes(bytes, width, std::min(shape.images, conv.block.n),
                                  shape.kernel_positions(),
                                  shape.window().height * shape.window().width) <= most_bytes;
}

HeldWay held_way(const Convolution& conv, const Knob& knob) {
  const ConvShape& shape = conv.shape;
  if (shape.group_in_channels() == 0 || skips_nothing(knob) || !sizes_fit(conv, /*thin=*/true)) {
    return HeldWay::kFilled;
  }
  const auto& device = check_device(conv.input.device());
  if (knob.tau && is_narrow(conv, static_cast<int64_t>(device.sharedMemPerBlockOptin))) {
    return HeldWay::kDepthwise;
  }
  const HeldConv x = held_size(conv);
  if (!are_groups_aligned(conv) && x.in_channels <= conv.block.k) return HeldWay::kThin;
  std::optional<bool> hopper;
  if (has_hopper_kernels(device)) {
    if (has_few_channels(conv, knob)) return HeldWay::kFilled;  // another backend
    hopper = is_of_hopper_type(conv) ? fits_boxes(conv)
                                     : split_conv_pays(x.in_channels) && fits_hopper(conv);
  }
  return choose_held_conv(conv.input.scalar_type(), conv.allow_tf32, hopper,
                          packs(conv, knob) && are_groups_aligned(conv), x,
                          device.multiProcessorCount);
}

template <HeldWay kWay>
bool supports_way(const Convolution& conv, const Knob& knob) {
  return held_way(conv, knob) == kWay;
}

template <HeldWay kWay>
ConvolutionResult run(const Convolution& given, const Knob& knob) {
  const Convolution conv = skips_nothing(knob) ? in_full_blocks(given) : given;
  const bool is_double = conv.input.scalar_type() == at::kDouble;
  return {is_double ? convolve<double>(conv, knob, kWay) : convolve<float>(conv, knob, kWay), {}};
}

const Backends<ConvBackend> registered(at::kCUDA, Rank::kPortable,
                                       {.convolve = {&supports, &run<HeldWay::kFilled>}});
template <HeldWay kWay>
Backends<ConvBackend> special(const char* name) {
  return {at::kCUDA, Rank::kSpecial, {.convolve = {&supports_way<kWay>, &run<kWay>}, .name = name}};
}
const auto of_thin = special<HeldWay::kThin>("sm80-thin");
const auto of_depthwise = special<HeldWay::kDepthwise>("sm80-depthwise");
const auto of_packed = special<HeldWay::kPacked>("sm80-packed");

// ---- Dense convolutions with ReLU ---------------------------------------------------------------
//
// cuDNN adds bias and residual and rectifies in the convolution's own kernel. It is torch's call
// (ATen/native/cudnn/ConvShared.cpp), which torch.compile cannot trace.

// cuDNN's fused kernels are for tensor cores. Half types with channels in units of 16 bytes alone
// take them: elsewhere, in TF32 as well, its ReLU turns NaN into zero. Offsets have 32 bits. With
// groups they convert more tensors than they save. Their call follows no deterministic setting.
bool supports_dense(const DenseConvolution& conv) {
  const at::Context& context = at::globalContext();
  const ConvShape& shape = conv.shape;
  const int64_t unit = 16 / conv.input.element_size();
  const int64_t outputs = c10::multiply_integers(shape.output_sizes());
  return conv.activation == Activation::kRelu &&
         at::isReducedFloatingType(conv.input.scalar_type()) && shape.groups == 1 &&
         shape.in_channels % unit == 0 && shape.out_channels % unit == 0 &&
         std::max(conv.input.numel(), outputs) <= std::numeric_limits<int32_t>::max() &&
         context.userEnabledCuDNN() && !context.deterministicCuDNN() &&
         !context.deterministicAlgorithms();
}

Tensor run_dense(const DenseConvolution& conv) {
  const ConvShape& shape = conv.shape;
  const auto stride = shape.stride.pair(), padding = shape.padding.pair(),
             dilation = shape.dilation.pair();
  if (!conv.residual) {
    return at::cudnn_convolution_relu(conv.input, conv.weight, conv.bias, stride, padding, dilation,
                                      shape.groups);
  }
  return at::cudnn_convolution_add_relu(conv.input, conv.weight, *conv.residual, /*alpha=*/1,
                                        conv.bias, stride, padding, dilation, shape.groups);
}

bool own_pays(const Convolution& conv) {
  const auto& device = check_device(conv.input.device());
  return own_unskipped_conv_pays(conv.input.scalar_type(), conv.allow_tf32,
                                 has_hopper_kernels(device), device.multiProcessorCount,
                                 unskipped_size(conv));
}

const Backends<UnskippedBackend> unskipped(at::kCUDA, Rank::kPortable, {&own_pays});
const Backends<DenseBackend> of_dense(at::kCUDA, Rank::kPortable,
                                      {.convolve = {&supports_dense, &run_dense}});

}  // namespace

Tensor held_pixel_norms(const Convolution& conv, const Tensor& input, const Knob& knob) {
  return pixel_norms<float>(im2col_matrix(conv, readable_pixels(input, 1), /*thin=*/true), conv,
                            knob, /*thin=*/true, OnDevice(input));
}

}  // namespace spamm::cuda
