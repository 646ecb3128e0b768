// Convolution without an im2col matrix, for pixel blocks of several images. One pass over the input
// copies it pixel by pixel and computes the norms of the copy (by_position.h). The norms of the
// im2col matrix follow from these, and the product reads the same copy.
//
// Input and output are channels last. Contiguous tensors are transposed on the way in and out: the
// extra copies take less time than reading elements that are far apart.
#include <ATen/Dispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include "conv/backend.h"
#include "conv/partial_blocks.h"
#include "cpu/conv/by_position.h"
#include "cpu/conv/norms.h"
#include "cpu/conv/product.h"
#include "cpu/conv/transpose.h"
#include "cpu/conv/weight_panels.h"
#include "threshold.h"

namespace spamm::cpu {
namespace {

using at::Tensor;

// The images of a pixel block are the rows of one call of the microkernel. With fewer, an im2col
// matrix pays, whose rows are all pixels of the block.
constexpr int64_t kLeastImages = 8;

constexpr int64_t kPanelWidth = 64;  // the widest panel that matrix instructions support

// The stages, for an input of any strides and a channels-last output. T: type of the tensors. P:
// type of the multiplied copies.
template <class T, class P>
void convolve(const Convolution& conv, const Knob& knob, const Tensor& norm_weight,
              const Tensor& output) {
  const Positions<T, P> positions(conv.input, conv.shape, conv.blocks.edge[0], conv.block.k);
  const Tensor norm_columns = column_norms(conv, positions).mT();
  const auto skip_norms = PartialBlockScale(conv.blocks, norm_columns.options())(norm_columns, 0);
  const Tensor tau = threshold_from_knob(norm_weight, norm_columns, knob, skip_norms);
  const WeightPanels<T, P> panels(conv.weight, conv.shape, std::min(conv.block.m, kPanelWidth),
                                  positions.depth());
  const ConvNorms norms{norm_weight.contiguous(),
                        skip_norms.value_or(norm_columns).mT().contiguous(), tau.item<double>()};
  ImplicitProduct<T, P>(conv, positions, panels, norms, output).run();
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
  return conv.blocks.edge[0] >= kLeastImages && conv.shape.in_channels > 0;
}

ConvolutionResult run(const Convolution& conv, const Knob& knob) {
  const ConvShape& shape = conv.shape;
  const Tensor norm_weight = weight_norms(conv);
  const Tensor output = at::empty(conv.output_sizes(), conv.input.options(), conv.output_format);
  with_types(output.scalar_type(), [&]<class T, class P>() {
    Convolution channels_last = conv;
    if (conv.input.is_contiguous() && !is_channels_last(conv.input)) {
      channels_last.input = channels_last_like(conv.input);
      transpose_matrices(conv.input.const_data_ptr<T>(), channels_last.input.mutable_data_ptr<T>(),
                         shape.images, shape.in_channels, shape.input.height * shape.input.width);
    }
    if (is_channels_last(output)) {
      convolve<T, P>(channels_last, knob, norm_weight, output);
      return;
    }
    const Tensor result = channels_last_like(output);
    convolve<T, P>(channels_last, knob, norm_weight, result);
    transpose_matrices(result.const_data_ptr<T>(), output.mutable_data_ptr<T>(), shape.images,
                       shape.output.height * shape.output.width, shape.out_channels);
  });
  if (conv.activation == Activation::kRelu) output.relu_();
  return {output, Tensor()};
}

ConvNormMaps norm_maps(const Convolution& conv) {
  Tensor norm_columns;
  with_types(conv.input.scalar_type(), [&]<class T, class P>() {
    const Positions<T, P> positions(conv.input, conv.shape, conv.blocks.edge[0], conv.block.k);
    norm_columns = column_norms(conv, positions).mT();
  });
  return {weight_norms(conv), norm_columns};
}

const Backends<ConvBackend> registered(at::kCPU, Rank::kPortable, {&supports, &run, &norm_maps});
// A piece is still in cache when it is multiplied.
const Backends<Im2colBudget> budget(at::kCPU, Rank::kPortable, {int64_t{8} << 20});

}  // namespace
}  // namespace spamm::cpu
