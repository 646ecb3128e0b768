// Hopper's convolution of deviations in pixel blocks of one image, of half types and of float32 as
// TF32; their concatenation; and their max pooling. Turns tensors into kernel parameters.
#include <c10/cuda/CUDAException.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <bit>

#include "block.h"
#include "conv/layers.h"
#include "cuda/conv/arguments_sm90.h"
#include "cuda/conv/launch.h"
#include "cuda/conv/sizes_sm90.h"
#include "cuda/device.h"
#include "cuda/operand.h"
#include "cuda/reference/launch_sm90.h"
#include "reference/reference.h"
#include "stage_range.h"
#include "threshold.h"

namespace spamm::cuda {
namespace {

using at::Tensor;
using namespace kernels::conv::sm90;
using namespace kernels::reference;

constexpr int64_t kGroup = 64;  // channels that share a norm

// Whether the kernel of deviations runs. It has a base or writes norms of pixels; other
// convolutions are the plain kernel's.
bool deviates(const Deviation& conv) { return conv.base || conv.wants_output_norms; }

// Whether the kernel works by strips (kernels/reference/sm90/strips.cuh): with a tau on the host
// that skips products of zeros alone.
bool runs_by_strips(const Deviation& conv, const Knob& knob) {
  if (!knob.tau || !knob.tau->is_cpu() || !is_half(conv.input.scalar_type())) return false;
  const auto tau = static_cast<float>(host_scalar(*knob.tau));
  // No other product of norms than zero is less than the smallest positive number.
  return tau > 0 && tau <= std::numeric_limits<float>::denorm_min() && deviates(conv) &&
         takes_strips(kernel_shape(conv.shape, conv.shape.in_channels),
                      log2_block(conv.blocks.edge), log2_of(conv.block.k));
}

bool phases_fit(const Deviation& conv) {
  const int64_t channels = conv.shape.out_channels / 4;
  const spamm::ConvShape& shape = conv.shape;
  return is_half(conv.input.scalar_type()) && (2 * channels == kGroup || channels % kGroup == 0) &&
         4 * shape.images * shape.output.height * shape.output.width * blocks_of(channels, kGroup) <
             kMost;
}

bool parts_fit(const Deviation& conv, const Knob& knob) {
  const auto is_aligned = [](const Tensor& x) {
    return x.size(1) > 0 && x.size(1) * x.element_size() % kAlignment == 0;
  };
  const auto& parts = conv.parts;
  return parts.size() == 1 ||
         (parts.size() == 2 && parts[0].size(1) % kGroup == 0 && is_aligned(parts[0]) &&
          is_aligned(parts[1]) && !conv.norms.empty() && runs_by_strips(conv, knob));
}

// A residual of float32 would need two blocks for a box.
bool fuses_epilogue(const Deviation& conv) {
  return !conv.residual || is_half(conv.input.scalar_type());
}

bool supports(const Deviation& conv, const Knob& knob) {
  const at::ScalarType dtype = conv.input.scalar_type();
  return (is_half(dtype) || (dtype == at::kFloat && conv.allow_tf32)) &&
         conv.shape.out_channels * conv.input.element_size() % kAlignment == 0 &&
         conv.blocks.edge[0] == 1 && fits_boxes(conv) && parts_fit(conv, knob) &&
         (!conv.in_phases || phases_fit(conv)) &&
         // The kernels of parts and phases write norms, and read no residual.
         (conv.is_whole() || (conv.wants_output_norms && !conv.residual)) &&
         // Where nothing is skipped and nothing is fused, dense mode is faster.
         !(skips_nothing(knob) && !(deviates(conv) && fuses_epilogue(conv)));
}

// The residual, as one image if all images have the same memory.
Deviation with_one_residual(Deviation conv) {
  if (conv.residual && conv.residual->stride(0) == 0 &&
      conv.residual->size(0) == conv.shape.images) {
    conv.residual = conv.residual->narrow(0, 0, 1);
  }
  return conv;
}

ConvolutionResult convolve(const Deviation& given, const Knob& knob) {
  const Deviation conv = with_one_residual(given);
  const OnDevice device(conv.input);
  const at::ScalarType dtype = conv.input.scalar_type();
  const bool is_one = conv.parts.size() == 1, by_strips = runs_by_strips(conv, knob);
  Arguments arguments(conv, readable_pixels(conv.input), readable_pixels(conv.weight));
  if (!is_one) arguments.params.shape.channels = static_cast<int>(conv.shape.in_channels);
  NormUse use = {.input = std::nullopt, .by_block = !by_strips, .tiles_differ = by_strips};
  if (!conv.norms.empty() && log2_group(conv.block) == log2_of(kGroup)) use.input = conv.norms[0];
  arguments.choose(conv, &use, device.multiprocessors());
  arguments.take_norms(use, knob, device.stream());
  auto sizes = conv.output_sizes();
  if (conv.in_phases) sizes = {sizes[0], sizes[1] / 4, sizes[2] * 2, sizes[3] * 2};
  arguments.set_output(sizes);

  DeviationParams p{};
  static_cast<ConvParams&>(p) = arguments.params;
  p.by_strips = by_strips;
  p.residual_is_shared = conv.residual && conv.residual->size(0) < given.residual->size(0);
  Tensor base, second, norm_second, output_norms;  // kept until the launch
  if (conv.base) {
    base = readable_pixels(*conv.base);
    p.base = base.const_data_ptr();
    p.base_activation = std::exchange(p.activation, Activation::kNone);
  }
  if (!is_one) {
    second = readable_pixels(conv.parts[1]);
    norm_second = conv.norms[1].contiguous();
    p.second = {second.const_data_ptr(), static_cast<int>(second.size(1)),
                norm_second.const_data_ptr<float>()};
  }
  if (conv.in_phases) p.phase_channels = static_cast<int>(sizes[1]);
  if (conv.wants_output_norms) {
    const int64_t columns = conv.in_phases ? columns_of_norms(sizes[1]) : 1;  // that share a norm
    output_norms =
        at::empty(pixel_norms_shape(sizes[0], {sizes[2], sizes[3] / columns}, sizes[1] * columns),
                  conv.input.options().dtype(at::kFloat), at::MemoryFormat::Contiguous);
    p.norm_pixels = output_norms.mutable_data_ptr<float>();
  }
  const StageRange stage(kMultiplyStage);
  const void *input = arguments.input.const_data_ptr(), *weight = arguments.weight.const_data_ptr();
  const kernels::Launch how = arguments.launch(device.multiprocessors(), device.stream());
  C10_CUDA_CHECK(deviates(conv) ? of_type(dtype, launch_deviation_conv<__half>,
                                          launch_deviation_conv<__nv_bfloat16>,
                                          launch_deviation_conv<float>)(p, input, weight, how)
                                : of_type(dtype, launch_conv<__half>, launch_conv<__nv_bfloat16>,
                                          launch_conv<float>)(p, input, weight, how));
  return {arguments.output, output_norms};
}

ConvolutionResult run(const Deviation& given, const Knob& knob) {
  if (is_half(given.input.scalar_type())) return convolve(given, knob);
  Deviation conv = given;
  if (!conv.norm_weight && !skips_nothing(knob)) {
    conv.norm_weight = norm_map_of_weight(conv.weight, conv.block);
  }
  if (fuses_epilogue(conv)) return convolve(conv, knob);
  Deviation plain = conv;
  plain.residual.reset();
  plain.base.reset();
  plain.activation = Activation::kNone;
  plain.wants_output_norms = false;
  const Tensor output = convolve(plain, knob).output;
  if (conv.base) {
    apply_deviation_epilogue_(output, conv.residual, *conv.base, conv.activation);
  } else {
    apply_epilogue_(output, conv.residual, conv.activation);
  }
  return {output, Tensor()};
}

// ---- Concatenation and max pooling by single pixels ---------------------------------------------

int64_t channels_of(at::TensorList parts) {
  int64_t sum = 0;
  for (const Tensor& part : parts) sum += part.size(1);
  return sum;
}

bool supports(at::TensorList parts) {
  const Tensor& first = parts[0];
  const at::ScalarType dtype = first.scalar_type();
  const int64_t lanes = blocks_of(channels_of(parts), kLayerNormBlock) * kLayerNormBlock *
                        first.element_size() / kAlignment;
  const auto fits = [](const Tensor& part) {
    return part.size(1) > 0 && part.size(1) * part.element_size() % kAlignment == 0;
  };
  return (is_half(dtype) || dtype == at::kFloat) && first.numel() > 0 &&
         parts.size() <= kMostJoined && std::all_of(parts.begin(), parts.end(), fits) &&
         has_hopper_kernels(check_device(first.device())) &&
         // Numbers of lines and of a line's threads are 32 bits wide, and so are those of the lines
         // behind the last, which lie up to 2^18 further on.
         first.size(0) * first.size(2) < kMost - (1 << 18) && first.size(3) * lanes < kMost;
}

ConvolutionResult run(at::TensorList parts) {
  const Tensor& first = parts[0];
  const OnDevice device(first);
  const int64_t images = first.size(0), channels = channels_of(parts);
  const Size2 size = {first.size(2), first.size(3)};
  const Tensor output = at::empty({images, channels, size.height, size.width}, first.options(),
                                  at::MemoryFormat::ChannelsLast);
  const Tensor norms = at::empty(pixel_norms_shape(images, size, channels),
                                 first.options().dtype(at::kFloat), at::MemoryFormat::Contiguous);
  JoinParams p{};
  p.output = output.mutable_data_ptr();
  p.norms = norms.mutable_data_ptr<float>();
  p.images = static_cast<int>(images);
  p.channels = static_cast<int>(channels);
  p.groups = static_cast<int>(norms.size(3));
  p.size = size2(size);
  std::vector<Tensor> read;  // kept until the launch
  for (const Tensor& part : parts) {
    read.push_back(readable_pixels(part));
    const int before =
        p.count == 0 ? 0 : p.parts[p.count - 1].first + p.parts[p.count - 1].channels;
    p.parts[p.count++] = {read.back().const_data_ptr(), before, static_cast<int>(part.size(1))};
  }
  const auto launch = of_type(first.scalar_type(), launch_join_deviations<__half>,
                              launch_join_deviations<__nv_bfloat16>, launch_join_deviations<float>);
  C10_CUDA_CHECK(launch(p, device.stream()));
  return {output, norms};
}

bool supports(const Tensor& input, const Tensor& reference, const std::optional<Tensor>&,
              const MaxPool& pool) {
  const int64_t group_chunks = kLayerNormBlock * input.element_size() / kAlignment;
  return reference.numel() < kMost &&
         pools_by_pixels(input, pool, blocks_of(input.size(1), kLayerNormBlock) * group_chunks);
}

ConvolutionResult run(const Tensor& input, const Tensor& reference,
                      const std::optional<Tensor>& norm_input, const MaxPool& pool) {
  const OnDevice device(input);
  const Tensor read = readable_pixels(input), of_reference = readable_pixels(reference);
  const Tensor output = empty_pooled(input, pool);
  const Tensor norms = at::empty(pixel_norms_shape(input.size(0), pool.output, input.size(1)),
                                 input.options().dtype(at::kFloat), at::MemoryFormat::Contiguous);
  DeviationPoolParams p{};
  static_cast<PixelPoolParams&>(p) = pixel_pool_params(read, output, pool);
  p.reference = of_reference.const_data_ptr();
  p.norms = norms.mutable_data_ptr<float>();
  p.groups = static_cast<int>(norms.size(3));
  Tensor of_input;  // kept until the launch
  const int64_t together = norm_input ? input.size(3) / norm_input->size(2) : 0;
  if (std::has_single_bit(static_cast<uint64_t>(together))) {
    of_input = norm_input->contiguous();
    p.norm_input = of_input.const_data_ptr<float>();
    p.log2_norm_columns = log2_of(together);
    p.norm_groups = static_cast<int>(of_input.size(3));
  }
  const auto launch = of_type(input.scalar_type(), launch_deviation_pool<__half>,
                              launch_deviation_pool<__nv_bfloat16>, launch_deviation_pool<float>);
  C10_CUDA_CHECK(launch(p, device.stream()));
  return {output, norms};
}

const Backends<ReferenceBackend> of_deviations(at::kCUDA, Rank::kHopper,
                                               {.convolve = {&supports, &run},
                                                .join = {&supports, &run},
                                                .pool = {&supports, &run}});

}  // namespace
}  // namespace spamm::cuda
