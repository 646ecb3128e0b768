// The parameters of a Hopper convolution's kernel, and which pixels share a box of it.
#include "cuda/conv/arguments_sm90.h"

#include "conv/shape.h"
#include "cuda/device.h"
#include "cuda/operand.h"
#include "stage_range.h"
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

constexpr int64_t kPixels = 64;  // of a box

// The box of which the fewest cover the output. Among equal ones, that with the most images: where
// a box is one pixel of several images, steps in the padding are not multiplied.
Box best_box(const spamm::ConvShape& shape) {
  const int log2_pixels = log2_of(kPixels);
  const Extent grid = extent(shape.images, shape.output);
  const kernels::Size2 stride = size2(shape.stride);
  Log2Block best = {log2_pixels, 0, 0};
  int64_t fewest = -1;
  for (int images = log2_pixels; images >= 0; --images) {
    for (int rows = 0; rows + images <= log2_pixels; ++rows) {
      const Log2Block box = {images, rows, log2_pixels - images - rows};
      if (!strides_fit(box, stride)) continue;
      const Extent boxes = count(grid, box);  // by shifts
      const int64_t number = int64_t{1} * boxes.images * boxes.rows * boxes.columns;
      if (fewest < 0 || number < fewest) {
        fewest = number;
        best = box;
      }
    }
  }
  return {int64_t{1} << best.images, int64_t{1} << best.rows, int64_t{1} << best.columns};
}

// The work by which choose_conv_sm90() goes.
ConvWork work_of(const Convolution& conv, const ConvParams& p, const NormUse* use) {
  const spamm::ConvShape& shape = conv.shape;
  // Pixel blocks of one image promise that no bit of an image depends on its batch.
  const int64_t block = conv.blocks.edge[0];
  const bool dense = use == nullptr;
  // Missing images change no bit where images are skipped by the block.
  const int64_t images =
      dense || p.by_pixel ? shape.images : blocks_of(shape.images, block) * block;
  const Extent grid = count(p.shape.output, p.box);
  // Operands are padded to blocks of 64 and more.
  return {.kernel = choose_kernel(conv.input.scalar_type(), {64, 64, 64}, conv.allow_tf32,
                                  /*hopper=*/true),
          .out_channels = shape.out_channels,
          .pixels = images * shape.output.height * shape.output.width,
          .steps = shape.kernel_positions() * blocks_of(shape.in_channels, 64),
          .boxes = int64_t{1} * grid.images * grid.rows * grid.columns,
          .by_pixel = p.by_pixel,
          .has_segments = block != 1 && (is_half(conv.input.scalar_type()) || p.by_pixel),
          .skips_nothing = dense,
          .computes_norms = !dense && (!use->input || !conv.norm_weight || use->by_block)};
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

Convolution in_dense_mode(Convolution conv) {
  spamm::ConvShape& shape = conv.shape;
  // Output norms are those of 64 images, so a box of these computes them on the way.
  const bool keeps_images = conv.wants_output_norms && shape.images >= kLayerNormBlock;
  const bool in_order =
      kernels::conv::sm90::reads_pixels_in_order(kernel_shape(shape, shape.in_channels));
  if (in_order && !keeps_images) {
    const int64_t pixels = shape.images * shape.input.height * shape.input.width;
    shape.images = 1;
    shape.input = shape.output = {1, pixels};
  }
  conv.blocks = {.grid = {shape.images, shape.output.height, shape.output.width},
                 .edge = keeps_images ? Box{kLayerNormBlock, 1, 1} : best_box(shape)};
  conv.block.n = kPixels;
  if (!supports_channels(conv.block, shape.out_channels, shape.in_channels)) {
    conv.block.m = conv.block.k = 64;
    conv.norm_weight.reset();
  }
  return conv;
}

std::optional<Box> box_of_several_pixels(const Convolution& conv) {
  const Box& edge = conv.blocks.edge;
  if (edge[1] * edge[2] > 1 || 2 * conv.shape.images > edge[0]) return std::nullopt;
  const Box box = best_box(conv.shape);
  return box[1] * box[2] > 1 ? std::optional<Box>(box) : std::nullopt;
}

Arguments::Arguments(const Convolution& conv, Tensor input, Tensor weight)
    : input(std::move(input)),
      weight(std::move(weight)),
      conv_(conv),
      bias_(conv.bias ? conv.bias->contiguous() : Tensor()),
      residual_(conv.residual ? readable_pixels(*conv.residual) : Tensor()) {
  params.shape = kernel_shape(conv.shape, this->input.size(1));
  params.block = log2_block(conv.blocks.edge);
  params.box = box_of(params.block);
  params.log2_block_m = log2_of(conv.block.m);
  params.log2_block_k = log2_of(conv.block.k);
  params.bias = conv.bias ? bias_.const_data_ptr() : nullptr;
  params.residual = conv.residual ? residual_.const_data_ptr() : nullptr;
  params.activation = conv.activation;
  params.slopes = slopes_of(conv);
}

void Arguments::choose(const Convolution& conv, const NormUse* use, int multiprocessors) {
  choice = choose_conv_sm90(work_of(conv, params, use), multiprocessors, forced_tile(),
                            forced_segments());
  static_assert(kMostSegments == 1 << kLog2MostSegments);
  params.log2_segments = log2_of(choice.segments);
}

void Arguments::take_norms(const NormUse& use, const Knob& knob, cudaStream_t stream) {
  norms_ = norms_of(use, stream);
  set(norms_, use, knob, stream);
}

ConvNorms Arguments::norms_of(const NormUse& use, cudaStream_t stream) const {
  // The last norm kernel before the convolution sets the counter to zero.
  if (!choice.claims_tiles) {
    return {conv_.norm_weight->contiguous(), use.input->contiguous(), {}, nullptr};
  }
  const StageRange stage(kNormMapStage);
  const auto options = input.options().dtype(at::kFloat);
  const int64_t pixels = conv_.shape.input.height * conv_.shape.input.width;
  const int64_t groups = blocks_of(input.size(1), int64_t{1} << log2_group(conv_.block));
  const int64_t count =
      use.input ? 0 : blocks_of(conv_.shape.images, conv_.blocks.edge[0]) * pixels * groups;
  ConvNorms norms;
  norms.own_pixels = at::empty({count + 1}, options);
  norms.pixels = use.input ? use.input->contiguous() : norms.own_pixels;
  norms.weight = conv_.norm_weight
                     ? conv_.norm_weight->contiguous()
                     : at::empty(weight_norms_shape(conv_.weight, conv_.block), options);
  auto* const own_pixels = norms.own_pixels.mutable_data_ptr<float>();
  norms.next_tile = reinterpret_cast<int*>(own_pixels + count);

  PixelNormsParams p{};
  p.zeroed = use.by_block ? nullptr : norms.next_tile;
  if (!use.input) {
    p.jobs[0] = norms_job(input.const_data_ptr(), conv_.shape.images, pixels, input.size(1),
                          log2_of(conv_.blocks.edge[0]), log2_group(conv_.block), own_pixels,
                          static_cast<int>(input.element_size()));
  }
  if (!conv_.norm_weight) p.jobs[1] = weight_job(weight, conv_.block, norms.weight);
  if (!use.input || !conv_.norm_weight) {
    C10_CUDA_CHECK(launch_norms(input.scalar_type(), p, stream));
  } else if (!use.by_block) {
    C10_CUDA_CHECK(launch_clear_counter(norms.next_tile, stream));
  }
  return norms;
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
  if (params.by_pixel) {
    const Extent boxes = count(params.shape.output, params.box);
    valid_pixels_ = at::empty({int64_t{1} * boxes.rows * boxes.columns * norms.weight.numel()},
                              input.options().dtype(at::kLong));
    params.valid_pixels = reinterpret_cast<uint64_t*>(valid_pixels_.mutable_data_ptr<int64_t>());
  }
  tau_ = {knob.tau ? *knob.tau : find_threshold(conv_, knob, norms.weight, norm_blocks_),
          at::kFloat};
  params.tau = tau_.argument<float>();
}

void Arguments::set_dense(const Knob& knob) {
  if (conv_.norm_weight) {
    norm_weight_ = conv_.norm_weight->contiguous();
    params.norm_weight = norm_weight_.const_data_ptr<float>();
  }
  tau_ = {*knob.tau, at::kFloat};
  params.tau = tau_.argument<float>();
}

void Arguments::set_output(at::IntArrayRef sizes) {
  output = at::empty(sizes, input.options(), at::MemoryFormat::ChannelsLast);
  params.output = output.mutable_data_ptr();
}

}  // namespace spamm::cuda
