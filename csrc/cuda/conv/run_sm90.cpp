#include "cuda/conv/run_sm90.h"

#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "block.h"
#include "cuda/conv/launch_sm90.h"
#include "cuda/conv/norms_sm90.h"
#include "cuda/conv/sizes_sm90.h"
#include "cuda/forced_segments.h"
#include "cuda/forced_tile.h"
#include "cuda/heuristics.h"
#include "stage_range.h"

namespace spamm::cuda {

using at::Tensor;
using namespace kernels::conv::sm90;

TileSize choose_tile(const Convolution& conv, const ConvParams& p, bool dense,
                     int multiprocessors) {
  const ConvKernel kernel =
      choose_conv_kernel(conv.input.scalar_type(), conv.allow_tf32, /*hopper=*/true);
  const Extent grid = count(p.shape.output, p.box);
  const int64_t boxes = int64_t{1} * grid.images * grid.rows * grid.columns;
  if (p.by_pixel) return choose_by_pixel_tile(p.shape.out_channels, boxes, multiprocessors);
  return choose_conv_tile_sm90(kernel, p.shape.out_channels, boxes, multiprocessors,
                               dense && p.log2_segments == 0, forced_tile());
}

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

bool runs_as_deviation(const Convolution& conv) {
  const bool deviates = conv.base || (conv.is_deviation && conv.wants_output_norms);
  return deviates && conv.blocks.edge[0] == 1;
}

template <class Element>
ConvolutionResult finish(const Convolution& conv, Arguments& arguments, const void* input,
                         const void* weight, TileSize tile, const OnDevice& device) {
  const StageRange stage(kMultiplyStage);
  ConvParams& p = arguments.params;
  const Tensor& output = arguments.output;
  const spamm::ConvShape& shape = conv.shape;
  const bool deviates = runs_as_deviation(conv);
  Tensor norms;
  if (conv.wants_output_norms) {
    const auto norms_shape = deviates ? pixel_norms_shape : layer_norms_shape;
    norms = at::empty(norms_shape(shape.images, shape.output, shape.out_channels),
                      output.options().dtype(at::kFloat), at::MemoryFormat::Contiguous);
  }
  // If a box covers the images of its output norms, the kernel computes them.
  const bool in_kernel =
      norms.defined() && (deviates || p.box.images == log2_of(kLayerNormBlock) ||
                          (p.by_pixel && takes_norms_of_pixels(p.box, shape.images)));
  if (in_kernel) (deviates ? p.norm_pixels : p.norm_output) = norms.mutable_data_ptr<float>();
  const auto launch = deviates ? launch_deviation_conv<Element> : launch_conv<Element>;
  C10_CUDA_CHECK(launch(
      p, input, weight,
      {.tile = tile, .multiprocessors = device.multiprocessors(), .stream = device.stream()}));
  if (norms.defined() && !in_kernel) output_norms<Element>(output, norms, device.stream());
  return {output, norms};
}

#define SPAMM_FINISH(Element)                                                             \
  template ConvolutionResult finish<Element>(const Convolution&, Arguments&, const void*, \
                                             const void*, TileSize, const OnDevice&);
SPAMM_FINISH(__half)
SPAMM_FINISH(__nv_bfloat16)
SPAMM_FINISH(float)
#undef SPAMM_FINISH

}  // namespace spamm::cuda
