// Hopper's convolution of float32 at full accuracy: turns tensors into kernel parameters.
//
// Input and weight are split into split parts. Where possible, the same pass computes their norms.

#include "conv/backend.h"
#include "cuda/conv/arguments_sm90.h"
#include "cuda/conv/launch.h"
#include "cuda/device.h"
#include "cuda/heuristics.h"
#include "cuda/multiply/multiply.h"
#include "cuda/operand.h"
#include "stage_range.h"
#include "threshold.h"

namespace spamm::cuda {
namespace {

using at::Tensor;

// A float32 operand's split parts. If `computes_norms`, the pass that splits it also writes the
// norms of blocks of 64 x 64 to `map`.
SplitTensor split(const Tensor& x, int split_parts, const Tensor& map, bool computes_norms) {
  MapMemory norms;
  if (computes_norms) {
    norms.norms = map.mutable_data_ptr();
    std::copy_n(map.strides().begin(), 3, norms.strides.begin());
  }
  return {x, /*k_dim=*/2, split_parts, /*granules=*/1, norms};
}

bool supports_split(const Convolution& conv, const Knob& knob) {
  // An im2col matrix, whose blocks may be of several pixels, may take less time where nothing is
  // skipped. Blocks of 64 images cost the same however few there are.
  const auto matrix_pays = [&] {
    const UnskippedConvTimes times = unskipped_f32_times(unskipped_size(conv));
    return times.matrix < times.split &&
           im2col_matrix_pays(Kernel::kSm90F32x3, conv.block, conv.shape.in_channels);
  };
  return conv.input.scalar_type() == at::kFloat && !conv.allow_tf32 &&
         conv.blocks.edge[1] * conv.blocks.edge[2] == 1 &&
         split_conv_pays(conv.shape.in_channels) && fits_hopper(conv) &&
         !(skips_nothing(knob) && matrix_pays());
}

ConvolutionResult run_split(const Convolution& conv, const Knob& knob) {
  const OnDevice device(conv.input);
  const Tensor input = readable_pixels(conv.input);
  const Tensor weight = readable_pixels(conv.weight, conv.block.k);
  const Tensor pixels = by_pixel(input), positions = by_pixel(weight);
  const auto empty = [&](at::IntArrayRef sizes) {
    return at::empty(sizes, input.options(), at::MemoryFormat::Contiguous);
  };
  // The maps are (blocks of images, pixels, channel groups) and (blocks of output channels, kernel
  // positions, channel groups). If the split computes a map, it is only allocated here.
  constexpr int64_t kEdge = kernels::kSplitBlock;
  const int64_t images = conv.blocks.edge[0];
  const int64_t group = std::max(conv.block.k, kEdge);  // channels covered by one norm
  const NormUse use = norm_use(conv, knob);
  const bool split_norms_input = !use.input && images == kEdge && group == kEdge;
  const bool split_norms_weight =
      !conv.norm_weight && conv.block.m == kEdge && conv.block.k == kEdge;
  const auto map_of = [&](const Tensor& x, int64_t rows, int64_t columns, bool by_split) {
    return by_split ? empty({blocks_of(x.size(1), rows), x.size(0), blocks_of(x.size(2), columns)})
                    : pixel_map(x, rows, columns);
  };
  const Tensor map_input =
      use.input ? use.input->contiguous() : map_of(pixels, images, group, split_norms_input);
  const Tensor map_weight =
      (conv.norm_weight ? conv.norm_weight->contiguous()
                        : map_of(positions, conv.block.m, conv.block.k, split_norms_weight))
          .view({blocks_of(weight.size(0), conv.block.m), positions.size(0), -1});
  const Tensor counter = at::empty({1}, input.options().dtype(at::kInt));

  std::optional<StageRange> stage(kNormMapStage);
  constexpr int kSplitParts = 2;
  const SplitTensor a =
      split(positions, kSplitParts, map_weight.transpose(0, 1), split_norms_weight);
  const SplitTensor b = split(pixels, kSplitParts, map_input.transpose(0, 1), split_norms_input);
  kernels::SplitParams params[] = {a.params(), b.params()};
  params[0].zeroed = counter.mutable_data_ptr<int>();
  C10_CUDA_CHECK(launch_split(params, kSplitParts, /*granules=*/1, device.stream()));
  stage.reset();

  Arguments arguments(conv, input, weight);
  arguments.set({.weight = map_weight.view({1, map_weight.size(0), -1}),
                 .pixels = map_input,
                 .own_pixels = {},
                 .next_tile = counter.mutable_data_ptr<int>()},
                use, knob, device.stream());
  arguments.set_output(conv.output_sizes());
  stage.emplace(kMultiplyStage);
  C10_CUDA_CHECK(launch_conv_f32x3({arguments.params, a.source(), b.source()},
                                   arguments.launch(device.multiprocessors(), device.stream())));
  return {arguments.output, Tensor()};
}

const Backends<ConvBackend> of_split(at::kCUDA, Rank::kHopper,
                                     {.convolve = {&supports_split, &run_split}});

}  // namespace
}  // namespace spamm::cuda
