// The norms of a Hopper convolution, one launch for input and weight; and Hopper's max pooling.
#include <array>

#include "conv/backend.h"
#include "cuda/conv/arguments_sm90.h"
#include "cuda/device.h"
#include "cuda/operand.h"
#include "spamm/spamm.h"
#include "stage_range.h"

namespace spamm::cuda {

using at::Tensor;
using namespace kernels::conv::sm90;

cudaError_t launch_norms(at::ScalarType dtype, const PixelNormsParams& p, cudaStream_t stream) {
  return of_type(dtype, launch_pixel_norms<__half>, launch_pixel_norms<__nv_bfloat16>,
                 launch_pixel_norms<float>)(p, stream);
}

PixelNormsJob weight_job(const Tensor& weight, const Block& block, const Tensor& norms) {
  return norms_job(weight.const_data_ptr(), weight.size(0), weight.size(2) * weight.size(3),
                   weight.size(1), log2_of(block.m), log2_group(block),
                   norms.mutable_data_ptr<float>(), /*entry_bytes=*/2, /*sliced=*/true);
}

std::array<int64_t, 3> weight_norms_shape(const Tensor& weight, const Block& block) {
  return {1, blocks_of(weight.size(0), block.m),
          weight.size(2) * weight.size(3) * blocks_of(weight.size(1), block.k)};
}

NormUse norm_use(const Convolution& conv, const Knob& knob) {
  const Box& edge = conv.blocks.edge;
  const bool fits =
      edge == Box{kLayerNormBlock, 1, 1} && log2_group(conv.block) == log2_of(kLayerNormBlock);
  return {.input = fits ? conv.norm_input : std::nullopt,
          .by_block = !knob.tau || edge[1] * edge[2] > 1};
}

Tensor by_pixel(const Tensor& x) {
  const int64_t channels = x.size(1), pixels = x.size(2) * x.size(3);
  return x.as_strided({pixels, x.size(0), channels}, {channels, pixels * channels, 1});
}

Tensor pixel_map(const Tensor& x, int64_t rows, int64_t channels) {
  return norm_map(x, {rows, channels}).transpose(0, 1).contiguous();
}

Tensor norm_map_of_weight(const Tensor& weight, const Block& block) {
  const Tensor norms = pixel_map(by_pixel(readable_pixels(weight)), block.m, block.k);
  return norms.view({1, norms.size(0), -1});
}

Tensor im2col_block_norms(const Convolution& conv, const ConvParams& p, const ConvNorms& norms,
                          cudaStream_t stream) {
  const StageRange stage(kNormMapStage);
  const Tensor blocks =
      at::empty({volume(conv.blocks.count()), norms.weight.size(2)}, norms.weight.options());
  const int64_t positions = conv.shape.kernel.height * conv.shape.kernel.width;
  C10_CUDA_CHECK(launch_block_norms({.pixel_norms = norms.pixels.const_data_ptr<float>(),
                                     .shape = p.shape,
                                     .block = p.block,
                                     .blocks = count(p.shape.output, p.block),
                                     .groups = static_cast<int>(norms.weight.size(2) / positions),
                                     .norms = blocks.mutable_data_ptr<float>(),
                                     .zeroed = norms.next_tile},
                                    stream));
  return blocks;
}

void output_norms(const Tensor& output, const Tensor& norms, cudaStream_t stream) {
  PixelNormsParams p{};
  p.jobs[0] = norms_job(output.const_data_ptr(), output.size(0), output.size(2) * output.size(3),
                        output.size(1), log2_of(kLayerNormBlock), log2_of(kLayerNormBlock),
                        norms.mutable_data_ptr<float>(), static_cast<int>(output.element_size()));
  C10_CUDA_CHECK(launch_norms(output.scalar_type(), p, stream));
}

namespace {

bool supports_weight(const Tensor& weight, int64_t groups, const Block& block) {
  return has_hopper_kernels(check_device(weight.device())) && groups == 1 && weight.numel() > 0 &&
         weight.numel() < kMost && is_half(weight.scalar_type()) &&
         supports_channels(block, weight.size(0), weight.size(1));
}

Tensor weight_norms_of(const Tensor& weight, int64_t, const Block& block) {
  const OnDevice device(weight);
  const Tensor pixels = readable_pixels(weight);
  const Tensor norms = at::empty(weight_norms_shape(weight, block),
                                 weight.options().dtype(at::kFloat), at::MemoryFormat::Contiguous);
  PixelNormsParams p{};
  p.jobs[1] = weight_job(pixels, block, norms);
  C10_CUDA_CHECK(launch_norms(weight.scalar_type(), p, device.stream()));
  return norms;
}

const Backends<ConvBackend> of_weights(at::kCUDA, Rank::kHopper,
                                       {.weight_norms = {&supports_weight, &weight_norms_of}});

// ---- Max pooling --------------------------------------------------------------------------------

bool supports_pool(const Tensor& input, const MaxPool& pool) {
  const at::ScalarType dtype = input.scalar_type();
  const int64_t pixel_bytes = input.size(1) * input.element_size();
  return (is_half(dtype) || dtype == at::kFloat) && input.numel() > 0 &&
         // With one pixel an image, torch may take channels-last memory for contiguous.
         input.suggest_memory_format() == at::MemoryFormat::ChannelsLast &&
         input.is_contiguous(at::MemoryFormat::ChannelsLast) && pixel_bytes % kAlignment == 0 &&
         has_hopper_kernels(check_device(input.device())) &&
         // Coordinates and numbers of threads are 32 bits wide.
         input.size(0) < kMost && input.size(1) < kMost &&
         input.size(2) * input.size(3) < kMost / 4 &&
         input.size(0) * pool.output.height * pool.output.width * (pixel_bytes / kAlignment) <
             kMost;
}

Tensor run_pool(const Tensor& input, const MaxPool& pool) {
  const OnDevice device(input);
  const Tensor read = readable_pixels(input);
  const Tensor output =
      at::empty({input.size(0), input.size(1), pool.output.height, pool.output.width},
                input.options(), at::MemoryFormat::ChannelsLast);
  const PixelPoolParams p = {
      .input = read.const_data_ptr(),
      .output = output.mutable_data_ptr(),
      .images = static_cast<int>(read.size(0)),
      .channels = static_cast<int>(read.size(1)),
      .in_size = {static_cast<int>(read.size(2)), static_cast<int>(read.size(3))},
      .out_size = size2(pool.output),
      .kernel = size2(pool.kernel),
      .stride = size2(pool.stride),
      .padding = size2(pool.padding),
      .dilation = size2(pool.dilation)};
  const auto launch = of_type(input.scalar_type(), launch_pixel_pool<__half>,
                              launch_pixel_pool<__nv_bfloat16>, launch_pixel_pool<float>);
  C10_CUDA_CHECK(launch(p, device.stream()));
  return output;
}

const Backends<DenseBackend> of_pools(at::kCUDA, Rank::kHopper,
                                      {.pool = {&supports_pool, &run_pool}});

}  // namespace
}  // namespace spamm::cuda
