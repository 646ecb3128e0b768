// Convolution without an im2col matrix, for pixel blocks of several images. One pass over the input
// copies it pixel by pixel and computes the norms of the copy (by_position.h). The norms of the
// im2col matrix follow from these, and the product reads the same copy.
//
// Input and output are channels last. Contiguous tensors are transposed on the way in and out: the
// extra copies take less time than reading elements that are far apart.
#include <ATen/Dispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <optional>
#include <type_traits>
#include <utility>

#include "conv/backend.h"
#include "conv/partial_blocks.h"
#include "cpu/common/transpose.h"
#include "cpu/conv/by_position.h"
#include "cpu/conv/norms.h"
#include "cpu/conv/pixels.h"
#include "cpu/conv/product.h"
#include "cpu/conv/weight_panels.h"
#include "cpu/reference/epilogue.h"
#include "reference/reference.h"
#include "stage_range.h"
#include "threshold.h"

namespace spamm::cpu {
namespace {

using at::Tensor;

// Matrix instructions multiply all images of a position by one call. With fewer, an im2col matrix
// pays, whose rows are all pixels of the block.
constexpr int64_t kLeastImages = 8;

constexpr int64_t kPanelWidth = 64;  // the widest panel that matrix instructions support

// The input as the product reads it: in place, or copied by position. Computes the norms of its
// pixels too, if there are to be any.
template <class T, class P>
class Source {
 public:
  Source(const Convolution& conv, PixelNorms<NormOf<T>>* norms) {
    const Tensor& input = conv.input;
    if constexpr (std::is_same_v<T, P> && !Microkernel<P>::kVnni) {
      if (input.stride(1) == 1 || input.size(1) == 1) {
        const int64_t depth = conv.shape.group_in_channels();
        pixels_ = {input.const_data_ptr<T>(), input.stride(0), input.stride(2),
                   input.stride(3),           depth,           depth};
        if (norms) norms->compute(pixels_);
        return;
      }
    }
    copy_.emplace(input, conv.shape, conv.blocks.edge[0], norms);
    pixels_ = copy_->pixels();
  }

  const Pixels<P>& pixels() const { return pixels_; }

 private:
  std::optional<Positions<T, P>> copy_;
  Pixels<P> pixels_;
};

// The norms and the threshold for a tau above zero, or that is to be searched.
template <class N>
ConvNorms<N> norms_and_tau(const Convolution& conv, const Knob& knob, const Tensor& norm_weight,
                           const PixelNorms<N>& pixels) {
  if (knob.tau) {
    const double tau = host_scalar(*knob.tau);
    const Box& edge = conv.blocks.edge;
    if (edge[1] == 1 && edge[2] == 1) return {norm_weight.contiguous(), Tensor(), &pixels, tau};
    const Tensor columns = column_norms(conv, pixels, ColumnNorms::kSkip);
    return {norm_weight.contiguous(), columns, nullptr, tau};
  }
  const Tensor columns = column_norms(conv, pixels, ColumnNorms::kPlain);
  const auto skip_norms = PartialBlockScale(conv.blocks, columns.options())(columns, 0);
  const Tensor tau = threshold_from_knob(norm_weight, columns, knob, skip_norms);
  return {norm_weight.contiguous(), skip_norms.value_or(columns), nullptr, tau.item<double>()};
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
void convolve(const Convolution& conv, const std::optional<Tensor>& base, const Knob& knob,
              const Tensor& output) {
  using N = NormOf<T>;
  std::optional<PixelNorms<N>> pixel_norms;
  if (!skips_nothing(knob)) pixel_norms.emplace(conv.shape, conv.blocks.edge[0], conv.block.k);
  std::optional<StageRange> stage;
  if (pixel_norms) stage.emplace(kNormMapStage);  // with the input's copy
  const Source<T, P> source(conv, pixel_norms ? &*pixel_norms : nullptr);
  stage.reset();
  ConvNorms<N> norms{};
  if (pixel_norms) norms = norms_and_tau(conv, knob, weight_norms(conv), *pixel_norms);
  WeightPanels<T, P> panels(conv.weight, conv.shape, std::min(conv.block.m, kPanelWidth),
                            source.pixels().depth);
  stage.emplace(kMultiplyStage);
  ImplicitProduct<T, P>(conv, base, source.pixels(), panels, norms, output).run();
}

// Calls run<T, P>() with the types for tensors of `dtype`.
template <class Run>
void with_types(at::ScalarType dtype, const Run& run) {
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, dtype, "conv2d", [&] {
    if constexpr (sizeof(scalar_t) == 2) {
      if (!multiplies_natively(dtype)) {
        run.template operator()<scalar_t, float>();
        return;
      }
    }
    run.template operator()<scalar_t, scalar_t>();
  });
}

bool is_channels_last(const Tensor& images) {
  return images.is_contiguous(at::MemoryFormat::ChannelsLast);
}

// A new channels-last tensor like `images`.
Tensor channels_last_like(const Tensor& images) {
  return with_large_pages(at::empty_like(images, images.options(), at::MemoryFormat::ChannelsLast));
}

bool supports(const Convolution& conv, const Knob&) {
  const at::ScalarType dtype = conv.input.scalar_type();
  const bool by_position = at::isReducedFloatingType(dtype) && multiplies_natively(dtype);
  return conv.shape.in_channels > 0 && (!by_position || conv.blocks.edge[0] >= kLeastImages);
}

// Contiguous images (images, channels, pixels) as channels-last ones.
template <class T>
Tensor to_channels_last(const Tensor& images) {
  const Tensor result = channels_last_like(images);
  transpose_matrices(images.const_data_ptr<T>(), result.mutable_data_ptr<T>(), images.size(0),
                     images.size(1), images.size(2) * images.size(3));
  return result;
}

template <class T, class P>
void convolve_to(const Tensor& output, const Convolution& conv, std::optional<Tensor> base,
                 const Knob& knob) {
  Convolution channels_last = without_stride(conv);
  Tensor& input = channels_last.input;
  if (input.is_contiguous() && !is_channels_last(input)) input = to_channels_last<T>(input);
  for (auto* operand : {&channels_last.residual, &base}) {
    if (!*operand || is_channels_last(**operand)) continue;
    *operand = (*operand)->is_contiguous() ? to_channels_last<T>(**operand)
                                           : (*operand)->contiguous(at::MemoryFormat::ChannelsLast);
  }
  if (is_channels_last(output)) {
    convolve<T, P>(channels_last, base, knob, output);
    return;
  }
  const Tensor result = channels_last_like(output);
  convolve<T, P>(channels_last, base, knob, result);
  transpose_matrices(result.const_data_ptr<T>(), output.mutable_data_ptr<T>(), output.size(0),
                     output.size(2) * output.size(3), output.size(1));
}

ConvolutionResult run(const Convolution& conv, const std::optional<Tensor>& base,
                      const Knob& knob) {
  const Tensor output =
      with_large_pages(at::empty(conv.output_sizes(), conv.input.options(), conv.output_format));
  with_types(output.scalar_type(),
             [&]<class T, class P>() { convolve_to<T, P>(output, conv, base, knob); });
  return {output, Tensor()};
}

ConvolutionResult run_plain(const Convolution& conv, const Knob& knob) {
  return run(conv, std::nullopt, knob);
}

bool fuses_epilogue(const Convolution&) { return true; }

// What skips nothing is torch's where there are groups, as without a base.
bool supports_deviations(const Deviation& conv, const Knob& knob) {
  return conv.base && conv.is_whole() && writes_deviations(conv.activation) &&
         (conv.shape.groups == 1 || !skips_nothing(knob)) && supports(conv, knob);
}

ConvolutionResult run_deviations(const Deviation& conv, const Knob& knob) {
  return run(conv, conv.base, knob);
}

ConvNormMaps norm_maps(const Convolution& conv) {
  Tensor columns;
  with_types(conv.input.scalar_type(), [&]<class T, class P>() {
    PixelNorms<NormOf<T>> pixel_norms(conv.shape, conv.blocks.edge[0], conv.block.k);
    const Source<T, P> source(conv, &pixel_norms);
    columns = column_norms(conv, pixel_norms, ColumnNorms::kPlain);
  });
  return {weight_norms(conv), columns};
}

const Backends<ConvBackend> registered(at::kCPU, Rank::kPortable,
                                       {.convolve = {&supports, &run_plain},
                                        .norm_maps = &norm_maps,
                                        .fuses_epilogue = &fuses_epilogue});
const Backends<ReferenceBackend> of_deviations(at::kCPU, Rank::kPortable,
                                               {.convolve = {&supports_deviations,
                                                             &run_deviations}});

}  // namespace
}  // namespace spamm::cpu
