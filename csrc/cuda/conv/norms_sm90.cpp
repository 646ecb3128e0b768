// The norms of a Hopper convolution: one launch for input and weight, and what registers them.
#include "cuda/conv/norms_sm90.h"

#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>

#include <array>

#include "cuda/conv/channels_last.h"
#include "cuda/conv/sizes_sm90.h"
#include "cuda/device.h"
#include "cuda/heuristics.h"
#include "cuda/hopper.h"
#include "spamm/spamm.h"
#include "stage_range.h"
#include "threshold.h"

namespace spamm::cuda {

using at::Tensor;
using namespace kernels::conv::sm90;

namespace {

PixelNormsJob weight_job(const Tensor& weight, const Block& block, const Tensor& norms) {
  return pixel_norms_job(weight.const_data_ptr(), weight.size(0), weight.size(2) * weight.size(3),
                         weight.size(1), log2_of(block.m), log2_group(block),
                         norms.mutable_data_ptr<float>(), /*entry_bytes=*/2, /*sliced=*/true);
}

std::array<int64_t, 3> weight_norms_shape(const Tensor& weight, const Block& block) {
  return {1, blocks_of(weight.size(0), block.m),
          weight.size(2) * weight.size(3) * blocks_of(weight.size(1), block.k)};
}

}  // namespace

NormUse norm_use(const Convolution& conv, const Knob& knob) {
  const Box& edge = conv.blocks.edge;
  const bool fits =
      edge == Box{kLayerNormBlock, 1, 1} && log2_group(conv.block) == log2_of(kLayerNormBlock);
  return {.input = fits ? conv.norm_input : std::nullopt,
          .by_block = !knob.tau || edge[1] * edge[2] > 1};
}

template <class Element>
ConvNorms conv_norms(const Convolution& conv, const Tensor& input, const Tensor& weight,
                     TileSize tile, const NormUse& use, cudaStream_t stream) {
  const auto options = input.options().dtype(at::kFloat);
  const bool computes_norms = !use.input || !conv.norm_weight;
  // The last norm kernel before the convolution sets the counter to zero.
  if (!claims_conv_tiles(tile, computes_norms || use.by_block, use.tiles_differ)) {
    return {conv.norm_weight->contiguous(), use.input->contiguous(), {}, nullptr};
  }
  const StageRange stage(kNormMapStage);
  const int64_t pixels = conv.shape.input.height * conv.shape.input.width;
  const int64_t groups = blocks_of(input.size(1), int64_t{1} << log2_group(conv.block));
  const int64_t count =
      use.input ? 0 : blocks_of(conv.shape.images, conv.blocks.edge[0]) * pixels * groups;
  ConvNorms norms;
  norms.own_pixels = at::empty({count + 1}, options);
  norms.pixels = use.input ? use.input->contiguous() : norms.own_pixels;
  norms.weight = conv.norm_weight ? conv.norm_weight->contiguous()
                                  : at::empty(weight_norms_shape(conv.weight, conv.block), options);
  auto* const own_pixels = norms.own_pixels.mutable_data_ptr<float>();
  norms.next_tile = reinterpret_cast<int*>(own_pixels + count);

  PixelNormsParams p{};
  p.zeroed = use.by_block ? nullptr : norms.next_tile;
  if (!use.input) {
    p.jobs[0] = pixel_norms_job(input.const_data_ptr(), conv.shape.images, pixels, input.size(1),
                                log2_of(conv.blocks.edge[0]), log2_group(conv.block), own_pixels,
                                sizeof(Element));
  }
  if (!conv.norm_weight) p.jobs[1] = weight_job(weight, conv.block, norms.weight);
  if (computes_norms) {
    C10_CUDA_CHECK(launch_pixel_norms<Element>(p, stream));
  } else if (!use.by_block) {
    C10_CUDA_CHECK(launch_clear_counter(norms.next_tile, stream));
  }
  return norms;
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

ConvNormMaps conv_norm_maps(const Convolution& conv, const ConvParams& p, const ConvNorms& norms,
                            cudaStream_t stream) {
  return {norms.weight, im2col_block_norms(conv, p, norms, stream).t().unsqueeze(0)};
}

template <class Element>
void output_norms(const Tensor& output, const Tensor& norms, cudaStream_t stream) {
  PixelNormsParams p{};
  p.jobs[0] =
      pixel_norms_job(output.const_data_ptr(), output.size(0), output.size(2) * output.size(3),
                      output.size(1), log2_of(kLayerNormBlock), log2_of(kLayerNormBlock),
                      norms.mutable_data_ptr<float>(), sizeof(Element));
  C10_CUDA_CHECK(launch_pixel_norms<Element>(p, stream));
}

#define SPAMM_CONV_NORMS(Element)                                                          \
  template ConvNorms conv_norms<Element>(const Convolution&, const Tensor&, const Tensor&, \
                                         TileSize, const NormUse&, cudaStream_t);          \
  template void output_norms<Element>(const Tensor&, const Tensor&, cudaStream_t);
SPAMM_CONV_NORMS(__half)
SPAMM_CONV_NORMS(__nv_bfloat16)
SPAMM_CONV_NORMS(float)
#undef SPAMM_CONV_NORMS

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
  const auto launch = weight.scalar_type() == at::kHalf ? launch_pixel_norms<__half>
                                                        : launch_pixel_norms<__nv_bfloat16>;
  C10_CUDA_CHECK(launch(p, device.stream()));
  return norms;
}

bool computes_output_norms(at::Device device, at::ScalarType dtype) {
  return is_half(dtype) && has_hopper_kernels(check_device(device));
}

const Backends<ConvBackend> registered(at::kCUDA, Rank::kHopper,
                                       {.weight_norms = {&supports_weight, &weight_norms_of},
                                        .output_norms = {&computes_output_norms}});

}  // namespace
}  // namespace spamm::cuda
