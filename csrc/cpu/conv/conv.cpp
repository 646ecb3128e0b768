// Convolution without an im2col matrix, for pixel blocks of several images. One pass over the input
// copies it pixel by pixel and computes the norms of the copy (Positions). The norms of the
// im2col matrix follow from these, and the product reads the same copy.
//
// Input and output are channels last. Contiguous tensors are transposed on the way in and out: the
// extra copies take less time than reading elements that are far apart.
#include <ATen/core/List.h>

#include "conv/backend.h"
#include "conv/shape.h"
#include "cpu/common/machine.h"
#include "cpu/common/transpose.h"
#include "cpu/conv/norms.h"
#include "cpu/conv/product.h"
#include "cpu/conv/weight_panels.h"
#include "cpu/multiply/microkernel.h"
#include "cpu/multiply/panels.h"
#include "stage_range.h"
#include "threshold.h"

namespace spamm::cpu {
namespace {

using at::Tensor;

// Tells whether tau is held, and a block is one pixel.
bool takes_pixel_norms(const Convolution& conv, const Knob& knob) {
  return knob.tau && conv.blocks.edge[1] == 1 && conv.blocks.edge[2] == 1;
}

// A convolution's input as the product reads it: in place, or a copy in the memory order (row,
// column, image, channel).
//
// In this order, one input pixel of several images is a plain matrix (images x channels), which is
// what matrix instructions read. The copy is also where half types become float32 for machines
// without such instructions. T: type of the input. P: type of what is read.
template <class T, class P>
class Source {
 public:
  // Computes `norms` too, if there are any: of a copy while it is in cache. Resets them where
  // surely nothing is skipped under a held tau.
  Source(const Convolution& conv, const Knob& knob, std::optional<PixelNorms<NormOf<T>>>& norms)
      : shape_(conv.shape),
        block_images_(conv.blocks.edge[0]),
        depth_(conv.shape.group_in_channels()) {
    const at::Tensor& input = conv.input;
    if constexpr (std::is_same_v<T, P> && !Microkernel<P>::kVnni) {
      if (input.stride(1) == 1 || input.size(1) == 1) {
        pixels_ = {input.const_data_ptr<T>(), input.stride(0), input.stride(2),
                   input.stride(3),           depth_,          depth_};
        if (norms && takes_pixel_norms(conv, knob) &&
            all_valid(conv, pixels_, host_scalar(*knob.tau)))
          norms.reset();
        if (norms) norms->compute(pixels_);
        return;
      }
    }
    if (Microkernel<P>::kVnni) depth_ += depth_ % 2;  // an even number of channels
    const int64_t per_image = shape_.groups * depth_, per_pixel = shape_.images * per_image;
    data_ = with_large_pages(at::empty(
        {shape_.input.height * shape_.input.width * per_pixel * static_cast<int64_t>(sizeof(P))},
        at::kByte));
    first_ = static_cast<P*>(data_.mutable_data_ptr());
    pixels_ = {first_, per_image, shape_.input.width * per_pixel, per_pixel, depth_, depth_};
    copy(input, norms ? &*norms : nullptr);
  }

  const Pixels<P>& pixels() const { return pixels_; }

 private:
  // A task copies about this much before it computes the norms, so that it stays in cache.
  static constexpr int64_t kTaskBytes = 256 << 10;

  // A task copies a part of one row, of the images of one block.
  void copy(const at::Tensor& input, PixelNorms<NormOf<T>>* norms) {
    const int64_t image_blocks = blocks_of(shape_.images, block_images_);
    const int64_t pixel_bytes = images(0) * pixels_.image_stride * static_cast<int64_t>(sizeof(P));
    const int64_t columns = std::clamp<int64_t>(kTaskBytes / pixel_bytes, 1, shape_.input.width);
    const int64_t parts = blocks_of(shape_.input.width, columns);
    at::parallel_for(0, shape_.input.height * parts * image_blocks, 1,
                     [&](int64_t from, int64_t to) {
                       for (int64_t task = from; task < to; ++task) {
                         const int64_t image_block = task % image_blocks;
                         const int64_t first = task / image_blocks % parts * columns;
                         const int64_t row = task / image_blocks / parts;
                         const int64_t last = std::min(first + columns, shape_.input.width);
                         copy_columns(input, row, first, last, image_block);
                         if (norms) norms->compute_columns(pixels_, image_block, row, first, last);
                       }
                     });
  }

  // Reads image by image, because pixels of one image's row are neighbours in memory.
  void copy_columns(const at::Tensor& input, int64_t row, int64_t first, int64_t last,
                    int64_t image_block) {
    // Without padding between the groups, one copy serves all.
    const int64_t groups = depth_ == shape_.group_in_channels() ? 1 : shape_.groups;
    const int64_t channels = shape_.in_channels / groups, depth = pixels_.image_stride / groups;
    const auto strides = input.strides();
    const int64_t first_image = image_block * block_images_;
    const T* source = input.const_data_ptr<T>() + first_image * strides[0] + row * strides[2] +
                      first * strides[3];
    P* target = first_ + (pixels_.at(first_image, row, first, 0) - pixels_.first);
    for (int64_t i = 0; i < images(image_block); ++i) {
      for (int64_t g = 0; g < groups; ++g) {
        const View<T> view{source + i * strides[0] + g * channels * strides[1], strides[3],
                           strides[1], last - first, channels};
        copy_rows(view, target + i * pixels_.image_stride + g * depth, pixels_.column_stride,
                  depth);
      }
    }
  }

  int64_t images(int64_t image_block) const {
    return std::min(block_images_, shape_.images - image_block * block_images_);
  }

  ConvShape shape_;
  int64_t block_images_, depth_;
  at::Tensor data_;  // bytes of P: (height, width, images, groups, depth)
  P* first_ = nullptr;
  Pixels<P> pixels_;
};

// Matrix instructions multiply all images of a position by one call. With fewer, an im2col matrix
// pays, whose rows are all pixels of the block.
constexpr int64_t kLeastImages = 8;

// The norms and the threshold for a tau above zero, or that is to be searched.
template <class N>
ConvNorms<N> norms_and_tau(const Convolution& conv, const Knob& knob, const Tensor& norm_weight,
                           const PixelNorms<N>& pixels) {
  if (takes_pixel_norms(conv, knob))
    return {norm_weight.contiguous(), Tensor(), &pixels, host_scalar(*knob.tau)};
  const Tensor columns = column_norms(conv, pixels);
  const auto skip_norms = PartialBlockScale(conv.blocks, columns.options())(columns, 0);
  const Tensor tau = threshold_from_knob(norm_weight, columns, knob, skip_norms);
  return {norm_weight.contiguous(), skip_norms.value_or(columns), nullptr, host_scalar(tau)};
}

// A kernel of 1 x 1 reads pixels at the distance of the stride, and no others.
Convolution without_stride(const Convolution& conv) {
  const ConvShape& shape = conv.shape;
  Convolution result = conv;
  const auto [padding, stride] = std::pair(shape.padding, shape.stride);
  if (shape.kernel_positions() != 1 || padding.height != 0 || padding.width != 0 ||
      (stride.height == 1 && stride.width == 1)) {
    return result;
  }
  result.input = conv.input.slice(2, 0, shape.input.height, stride.height)
                     .slice(3, 0, shape.input.width, stride.width);
  result.shape.input = shape.output;
  result.shape.stride = {1, 1};
  return result;
}

// The stages, for an input of any strides and a channels-last output. T: type of the tensors. P:
// type of the multiplied operands.
template <class T, class P>
void convolve(const Convolution& conv, const Knob& knob, const Tensor& output) {
  using N = NormOf<T>;
  std::optional<PixelNorms<N>> pixel_norms;
  if (!skips_nothing(knob)) pixel_norms.emplace(conv.shape, conv.blocks.edge[0], conv.block.k);
  std::optional<StageRange> stage;
  if (pixel_norms) stage.emplace(kNormMapStage);  // with the input's copy
  const Source<T, P> source(conv, knob, pixel_norms);
  stage.reset();
  ConvNorms<N> norms{};
  if (pixel_norms) norms = norms_and_tau(conv, knob, *conv.norm_weight, *pixel_norms);
  WeightPanels<T, P> panels(conv.weight, conv.shape, std::min(conv.block.m, kPanelWidth),
                            source.pixels().depth);
  stage.emplace(kMultiplyStage);
  ImplicitProduct<T, P>(conv, source.pixels(), panels, norms, output).run();
}

bool is_channels_last(const Tensor& images) {
  return images.is_contiguous(at::MemoryFormat::ChannelsLast);
}

Tensor channels_last_like(const Tensor& images) {
  return with_large_pages(at::empty_like(images, images.options(), at::MemoryFormat::ChannelsLast));
}

bool supports(const Convolution& conv, const Knob&) {
  const at::ScalarType dtype = conv.input.scalar_type();
  const bool by_position = at::isReducedFloatingType(dtype) && multiplies_natively(dtype);
  return conv.shape.in_channels > 0 && (!by_position || conv.blocks.edge[0] >= kLeastImages);
}

template <class T>
Tensor to_channels_last(const Tensor& images) {
  const Tensor result = channels_last_like(images);
  transpose_matrices(images.const_data_ptr<T>(), result.mutable_data_ptr<T>(), images.size(0),
                     images.size(1), images.size(2) * images.size(3));
  return result;
}

template <class T, class P>
void convolve_to(const Tensor& output, const Convolution& conv, const Knob& knob) {
  Convolution channels_last = without_stride(conv);
  if (!skips_nothing(knob)) channels_last.norm_weight = weight_norms(conv);
  Tensor& input = channels_last.input;
  if (input.is_contiguous() && !is_channels_last(input)) input = to_channels_last<T>(input);
  if (auto& residual = channels_last.residual; residual && !is_channels_last(*residual)) {
    residual = residual->is_contiguous() ? to_channels_last<T>(*residual)
                                         : residual->contiguous(at::MemoryFormat::ChannelsLast);
  }
  if (is_channels_last(output)) {
    convolve<T, P>(channels_last, knob, output);
    return;
  }
  const Tensor result = channels_last_like(output);
  convolve<T, P>(channels_last, knob, result);
  transpose_matrices(result.const_data_ptr<T>(), output.mutable_data_ptr<T>(), output.size(0),
                     output.size(2) * output.size(3), output.size(1));
}

ConvolutionResult run(const Convolution& conv, const Knob& knob) {
  const Tensor output =
      with_large_pages(at::empty(conv.output_sizes(), conv.input.options(), conv.output_format));
  with_panel_types(output.scalar_type(),
                   [&]<class T, class P>() { convolve_to<T, P>(output, conv, knob); });
  return {output, Tensor()};
}

bool fuses_epilogue(const Convolution&) { return true; }

const Backends<ConvBackend> registered(at::kCPU, Rank::kPortable,
                                       {.convolve = {&supports, &run},
                                        .fuses_epilogue = &fuses_epilogue});

// ---- Dense convolutions -------------------------------------------------------------------------
//
// By oneDNN, whose call takes weights that are packed in its own layout, and applies activations to
// the sums before it rounds them: the call that torch.compile makes of both. Activations are faster
// so for channels-last tensors alone (docs/kernels/conv.md). oneDNN's relu and relu6 turn NaN into
// 0, and are not used.

using at::IntArrayRef;
using Scalars = c10::List<std::optional<at::Scalar>>;

using Pointwise = Tensor(const Tensor& input, const Tensor& weight,
                         const std::optional<Tensor>& bias, IntArrayRef padding, IntArrayRef stride,
                         IntArrayRef dilation, int64_t groups, std::string_view attr,
                         Scalars scalars, std::optional<std::string_view> algorithm);

// torch's op, in builds of torch with oneDNN.
std::optional<c10::OperatorHandle> find_pointwise() {
  static const auto op =
      c10::Dispatcher::singleton().findSchema({"mkldnn::_convolution_pointwise", ""});
  return op;
}

// The least for which the call costs less than a second pass.
constexpr int64_t kLeastOutputs = int64_t{1} << 18;

bool supports_dense(const DenseConvolution& conv) {
  if (conv.weight.is_mkldnn()) return true;
  return facts_of(conv.activation).onednn != nullptr && !conv.residual &&
         conv.input.scalar_type() == at::kFloat &&
         conv.output_format == at::MemoryFormat::ChannelsLast &&
         c10::multiply_integers(conv.shape.output_sizes()) >= kLeastOutputs &&
         at::globalContext().userEnabledMkldnn() && find_pointwise();
}

Tensor run_dense(const DenseConvolution& conv) {
  const ConvShape& shape = conv.shape;
  const char* const attribute = conv.residual ? nullptr : facts_of(conv.activation).onednn;
  const Tensor output = find_pointwise()->typed<Pointwise>().call(
      conv.input, conv.weight, conv.bias, shape.padding.pair(), shape.stride.pair(),
      shape.dilation.pair(), shape.groups, attribute ? attribute : "none", Scalars(), "");
  return apply_epilogue(output, conv.residual, attribute ? Activation::kNone : conv.activation,
                        conv.slope);
}

const Backends<DenseBackend> of_dense(at::kCPU, Rank::kPortable,
                                      {.convolve = {&supports_dense, &run_dense}});

// Measured on AVX-512: oneDNN has no fast float64, and of float16 only where there are instructions
// for it. It multiplies the padding, of which small pictures have much.
bool own_pays(const Convolution& conv) {
  constexpr double kMostInside = 0.75, kLeastFilled = 0.8;  // shares
  const int64_t channels = conv.shape.out_channels, panels = blocks_of(channels, kPanelWidth);
  switch (conv.input.scalar_type()) {
    case at::kFloat:
      return conv.shape.share_inside() < kMostInside;
    case at::kDouble:
      return static_cast<double>(channels) >
             kLeastFilled * static_cast<double>(panels * kPanelWidth);
    default:
      return conv.input.scalar_type() == at::kHalf;
  }
}

const Backends<UnskippedBackend> unskipped(at::kCPU, Rank::kPortable, {&own_pays});

}  // namespace
}  // namespace spamm::cpu
