// Convolution as SpAMM: weight matrix (out_channels x K) times im2col matrix (K x pixels), groups
// as batches, in the pipeline's order: norm map -> threshold -> multiply.
//
// Where a device has a convolution without an im2col matrix (conv/backend.h), that is taken. What
// follows here serves everything else, device-free: built of ATen ops and of the stages, each
// dispatched on its own.
//
// The im2col matrix is explicit but never whole: it is built, tested and multiplied in pieces that
// fit a budget. A given tau takes one pass over the pieces. A searched one needs all norms first,
// so that pieces are built twice unless there is only one.
//
// What is multiplied is the transposed product, pixels x K times K x out_channels: im2col rows as
// they are built and the output's channels as they lie in memory, with the same blocks skipped.
#include <ATen/Functions.h>
#include <torch/library.h>

#include <vector>

#include "checks.h"
#include "conv/backend.h"
#include "conv/im2col.h"
#include "conv/layers.h"
#include "conv/partial_blocks.h"
#include "conv/pixel_blocks.h"
#include "conv/shape.h"
#include "spamm/spamm.h"
#include "threshold.h"

namespace spamm {
namespace {

using OptTensor = std::optional<Tensor>;

// Bytes of im2col matrix held at a time (one pixel block at least, however large). On the CPU a
// piece should still be in cache when it is multiplied; a GPU wants pieces that fill it.
int64_t piece_budget(at::Device device) { return int64_t{device.is_cuda() ? 256 : 8} << 20; }

// (groups, out_channels / groups, K): K in the im2col matrix's order.
Tensor weight_matrix(const Tensor& weight, int64_t groups, int64_t block_k) {
  const int64_t rows = weight.size(0) / groups, channels = weight.size(1);
  const int64_t padding = blocks_of(channels, block_k) * block_k - channels;
  const Tensor channels_last = weight.permute({0, 2, 3, 1});
  const Tensor padded = padding ? at::constant_pad_nd(channels_last, {0, padding}) : channels_last;
  return padded.reshape({groups, rows, weight.size(2) * weight.size(3) * (channels + padding)});
}

// Channels last if the input or the weight is, as in torch's own convolutions.
at::MemoryFormat output_format(const Tensor& input, const Tensor& weight) {
  const bool channels_last = input.suggest_memory_format() == at::MemoryFormat::ChannelsLast ||
                             weight.suggest_memory_format() == at::MemoryFormat::ChannelsLast;
  return channels_last ? at::MemoryFormat::ChannelsLast : at::MemoryFormat::Contiguous;
}

// Copies the piece's part of the product, (groups, pixels, out_channels / groups), into the output.
void store(const Tensor& product, const Piece& piece, const PixelBlocks& blocks,
           const Tensor& output) {
  const auto& [c0, c1, c2] = piece.count;
  const auto& [e0, e1, e2] = blocks.edge;
  const Tensor boxes = product.view({product.size(0), c0, c1, c2, e0, e1, e2, product.size(2)})
                           .permute({1, 4, 2, 5, 3, 6, 0, 7});
  const Box covered = {c0 * e0, c1 * e1, c2 * e2};
  Box inside;
  Tensor target = output.permute({0, 2, 3, 1});
  for (int d = 0; d < 3; ++d) {
    const int64_t start = piece.first[d] * blocks.edge[d];
    inside[d] = std::min(covered[d], blocks.grid[d] - start);
    target = target.narrow(d, start, inside[d]);
  }
  if (inside == covered) {
    target.view(boxes.sizes()).copy_(boxes);
    return;
  }
  Tensor whole = boxes.reshape({covered[0], covered[1], covered[2], target.size(3)});
  for (int d = 0; d < 3; ++d) whole = whole.narrow(d, 0, inside[d]);
  target.copy_(whole);
}

// The norms of the weight matrix that the caller supplies must be what norm_map would give.
void check_norm_weight(const Convolution& conv) {
  if (!conv.norm_weight) return;
  const Tensor& norm = *conv.norm_weight;
  const auto [m, k, n] = conv.block;
  const ConvShape& shape = conv.shape;
  const int64_t positions = shape.kernel.height * shape.kernel.width;
  const int64_t depth = positions * blocks_of(shape.group_in_channels(), k);
  check_given_norm_map(norm, {shape.groups, blocks_of(shape.group_out_channels(), m), depth},
                       conv.weight, {shape.groups, shape.group_out_channels(), depth * k},
                       "norm_weight");
}

// The stages in order, piece by piece, into `output`.
void convolve(const Convolution& conv, const Knob& knob, const Tensor& output) {
  const Tensor& input = conv.input;
  const ConvShape& shape = conv.shape;
  const Block& block = conv.block;
  const PixelBlocks& blocks = conv.blocks;
  const OptTensor &bias = conv.bias, &norm_weight = conv.norm_weight;
  const bool on_cpu = input.is_cpu() && cpu::has_implicit_conv(conv);
  // The CPU's own convolution reads the weight as it is: with norms at hand no matrix is needed.
  const Tensor weights =
      on_cpu && norm_weight ? Tensor() : weight_matrix(conv.weight, shape.groups, block.k);
  const Tensor norm_a = norm_weight ? *norm_weight : norm_map(weights, {block.m, block.k});
  if (on_cpu) {
    cpu::implicit_conv(conv, knob, norm_a, output);
    if (conv.relu) output.relu_();
    return;
  }
#ifdef SPAMM_WITH_CUDA
  if (cuda::has_implicit_conv_sm80(conv)) {
    cuda::implicit_conv_sm80(conv, knob, weights, norm_a, output);
    return;
  }
#endif
  const Im2col im2col(input, shape, blocks, block.k);
  const PartialBlockScale scale(blocks, norm_a.options());
  const auto norms_of = [&](const Tensor& pixels) {
    return norm_map(pixels.mT(), {block.k, block.n});
  };
  const auto threshold_for = [&](const Tensor& norm_b) {
    return threshold_from_knob(norm_a, norm_b, knob.tau, knob.valid_ratio, knob.max_error,
                               scale(norm_b, 0));
  };

  const int64_t block_bytes =
      shape.groups * block.n * std::max<int64_t>(weights.size(2), 1) * input.element_size();
  const auto pieces = cut(blocks.count(), piece_budget(input.device()) / block_bytes);
  OptTensor threshold = knob.tau;
  std::vector<Tensor> norms;  // of all pieces, where the threshold depends on them all
  if (!threshold && pieces.size() > 1) {
    for (const Piece& piece : pieces) norms.push_back(norms_of(im2col.transposed(piece)));
    threshold = threshold_for(at::cat(norms, -1));
  }
  const OptTensor bias_row =
      bias ? OptTensor(bias->view({shape.groups, 1, shape.group_out_channels()})) : std::nullopt;
  int64_t first = 0;  // pixel block of the piece
  for (size_t p = 0; p < pieces.size(); ++p) {
    const Tensor pixels = im2col.transposed(pieces[p]);
    const Tensor norm_b = norms.empty() ? norms_of(pixels) : norms[p];
    if (!threshold) threshold = threshold_for(norm_b);  // of the only piece
    const Tensor product =
        multiply(pixels, weights.mT(), scale(norm_b, first).value_or(norm_b).mT(), norm_a.mT(),
                 *threshold, {block.n, block.k, block.m}, bias_row);
    store(product, pieces[p], blocks, output);
    first += norm_b.size(-1);
  }
  if (conv.relu) output.relu_();
}

ConvolutionResult convolve(const Convolution& conv, const Knob& knob) {
  const ConvShape& shape = conv.shape;
  const auto format = output_format(conv.input, conv.weight);
  const std::array<int64_t, 4> sizes = {shape.images, shape.out_channels, shape.output.height,
                                        shape.output.width};
  const bool empty = c10::multiply_integers(sizes) == 0;
#ifdef SPAMM_WITH_SM90A
  if (!empty) {
    const bool few_channels = cuda::has_few_channels_conv(conv, knob);
    if (few_channels || cuda::has_implicit_conv(conv)) {
      const auto [output, norms] =
          few_channels ? cuda::few_channels_conv(conv) : cuda::implicit_conv(conv, knob);
      return {output.contiguous(format),
              conv.wants_output_norms && !norms.defined() ? layer_norms(output) : norms};
    }
  }
#endif
  const Tensor output = at::empty(sizes, conv.input.options(), format);
  if (!empty) convolve(conv, knob, output);
  return {output, conv.wants_output_norms ? layer_norms(output) : Tensor()};
}

}  // namespace

ConvolutionResult check_and_convolve(const Tensor& input, const Tensor& weight,
                                     const OptTensor& bias, IntArrayRef stride, IntArrayRef padding,
                                     IntArrayRef dilation, int64_t groups, const OptTensor& tau,
                                     std::optional<double> valid_ratio,
                                     std::optional<double> max_error, at::OptionalIntArrayRef block,
                                     at::OptionalIntArrayRef pixel_block,
                                     const OptTensor& norm_weight, const OptTensor& norm_input,
                                     bool relu, bool wants_output_norms) {
  check_knobs(tau, valid_ratio, max_error);
  if (tau) check_tau(*tau, input.device());
  const ConvShape shape = check_convolution(input, weight, bias, stride, padding, dilation, groups);
  const Block edges =
      conv_block(block, pixel_block, shape.group_out_channels(), shape.group_in_channels());
  const PixelBlocks blocks = {
      .grid = {shape.images, shape.output.height, shape.output.width},
      .edge = pixel_block ? check_pixel_block(*pixel_block)
                          : default_pixel_block(tau.has_value(), shape.images, edges.n)};
  const Tensor batch = input.dim() == 4 ? input : input.unsqueeze(0);
  const Convolution conv = {batch, weight, bias,        relu,       shape,
                            edges, blocks, norm_weight, norm_input, wants_output_norms};
  check_norm_weight(conv);
  if (norm_input) {
    check_given_norm_map(*norm_input,
                         layer_norms_shape(shape.images, shape.input, shape.in_channels), batch,
                         batch.sizes(), "norm_input");
  }
  auto [output, norms] = convolve(conv, {tau, valid_ratio, max_error});
  return {input.dim() == 4 ? output : output.squeeze(0), norms};
}

namespace {

Tensor conv2d_op(const Tensor& input, const Tensor& weight, const OptTensor& bias,
                 IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation, int64_t groups,
                 const OptTensor& tau, std::optional<double> valid_ratio,
                 std::optional<double> max_error, at::OptionalIntArrayRef block,
                 at::OptionalIntArrayRef pixel_block, const OptTensor& norm_weight,
                 const OptTensor& norm_input, bool relu) {
  return check_and_convolve(input, weight, bias, stride, padding, dilation, groups, tau,
                            valid_ratio, max_error, block, pixel_block, norm_weight, norm_input,
                            relu, /*wants_output_norms=*/false)
      .output;
}

std::tuple<Tensor, Tensor> conv2d_with_norms_op(
    const Tensor& input, const Tensor& weight, const OptTensor& bias, IntArrayRef stride,
    IntArrayRef padding, IntArrayRef dilation, int64_t groups, const OptTensor& tau,
    std::optional<double> valid_ratio, std::optional<double> max_error,
    at::OptionalIntArrayRef block, at::OptionalIntArrayRef pixel_block,
    const OptTensor& norm_weight, const OptTensor& norm_input, bool relu) {
  auto [output, norms] = check_and_convolve(
      input, weight, bias, stride, padding, dilation, groups, tau, valid_ratio, max_error, block,
      pixel_block, norm_weight, norm_input, relu, /*wants_output_norms=*/true);
  return {output, norms};
}

Tensor conv2d_weight_norm_op(const Tensor& weight, int64_t groups, at::OptionalIntArrayRef block,
                             at::OptionalIntArrayRef pixel_block) {
  check_conv_weight(weight, groups);
  const Block edges = conv_block(block, pixel_block, weight.size(0) / groups, weight.size(1));
#ifdef SPAMM_WITH_SM90A
  if (cuda::has_implicit_weight_norm(weight, groups, edges)) {
    return cuda::implicit_weight_norm(weight, edges);
  }
#endif
  return norm_map(weight_matrix(weight, groups, edges.k), {edges.m, edges.k});
}

}  // namespace

Tensor layer_norms(const Tensor& output) {
  const Tensor by_pixel = output.permute({2, 3, 0, 1});  // of matrices (images, channels)
  return norm_map(by_pixel, {kLayerNormBlock, kLayerNormBlock}).permute({2, 0, 1, 3}).contiguous();
}

TORCH_LIBRARY_IMPL(spamm_torch, CompositeExplicitAutograd, m) {
  m.impl("conv2d", &conv2d_op);
  m.impl("conv2d_with_norms", &conv2d_with_norms_op);
  m.impl("conv2d_weight_norm", &conv2d_weight_norm_op);
}

}  // namespace spamm
