// Convolution as SpAMM: weight matrix (out_channels x K) times im2col matrix (K x pixels), groups
// as batches. If no backend (conv/backend.h) supports the arguments, the device-free code below
// builds the im2col matrix from ATen ops and calls the stages.
//
// The matrix is built in pieces that fit a budget. With a held tau, each piece is built once. A
// searched tau needs the norms of all pieces first, so several pieces are built twice.
//
// The product is computed transposed, (pixels x K) @ (K x out_channels), because the im2col rows
// and the output's channels are then contiguous. The same blocks are skipped.
#include "checks.h"
#include "conv/backend.h"
#include "conv/shape.h"
#include "environment.h"
#include "spamm/spamm.h"
#include "threshold.h"

namespace spamm {
namespace {

// ---- The im2col matrix, in pieces ---------------------------------------------------------------
//
// The matrix is (K, pixels) for each group. K runs over (kernel row, kernel column, channel). The
// channels of each kernel position are padded with zeros to a multiple of the block's k, so that no
// block spans two kernel positions. The columns are the output pixels, pixel block by pixel block.
// Columns outside the output grid are zero.

// Pixel blocks [first, first + count) along each dimension, in units of blocks.
struct Piece {
  Box first, count;
};

// Cuts all pixel blocks into pieces of one to `most` blocks. Each piece is a run of consecutive
// blocks, and the pieces are in block order.
std::vector<Piece> cut(const Box& blocks, int64_t most) {
  // The blocks of a piece. A dimension is cut only if a piece has one block along each outer one;
  // otherwise the blocks of a piece would not be consecutive.
  Box step;
  for (int d = 2; d >= 0; --d) {
    most = std::max<int64_t>(most, 1);
    step[d] = std::min(most, blocks[d]);
    most /= blocks[d];
  }
  std::vector<Piece> pieces;
  for (int64_t image = 0; image < blocks[0]; image += step[0]) {
    for (int64_t row = 0; row < blocks[1]; row += step[1]) {
      for (int64_t column = 0; column < blocks[2]; column += step[2]) {
        const Box first = {image, row, column};
        Box count;
        for (int d = 0; d < 3; ++d) count[d] = std::min(step[d], blocks[d] - first[d]);
        pieces.push_back({first, count});
      }
    }
  }
  return pieces;
}

// The input as (images, height, width, channels), padded with zeros.
at::Tensor padded(const at::Tensor& input, const ConvShape& shape) {
  const at::Tensor pixels = input.permute({0, 2, 3, 1});
  const auto [rows, columns] = shape.padding;
  if (rows == 0 && columns == 0) return pixels.contiguous();
  const at::Tensor source = at::zeros({shape.images, shape.input.height + 2 * rows,
                                       shape.input.width + 2 * columns, shape.in_channels},
                                      input.options());
  source.narrow(1, rows, shape.input.height).narrow(2, columns, shape.input.width).copy_(pixels);
  return source;
}

class Im2col {
 public:
  // `input` is (images, channels, height, width), in any memory format.
  Im2col(const at::Tensor& input, const ConvShape& shape, const PixelBlocks& blocks,
         int64_t block_k)
      : shape_(shape), blocks_(blocks), block_k_(block_k), source_(padded(input, shape)) {}

  // The piece's columns, transposed: (groups, pixels of the piece, K), contiguous.
  at::Tensor transposed(const Piece& piece) const {
    const auto& [count, edge] = std::tie(piece.count, blocks_.edge);
    const int64_t channels = shape_.group_in_channels();
    const int64_t padded_channels = blocks_of(channels, block_k_) * block_k_;
    const at::Tensor boxes =
        at::empty({shape_.groups, count[0], count[1], count[2], edge[0], edge[1], edge[2],
                   shape_.kernel.height, shape_.kernel.width, padded_channels},
                  source_.options());
    if (padded_channels > channels) boxes.narrow(-1, channels, padded_channels - channels).zero_();
    const std::array<std::vector<Part>, 3> inside = {parts(piece, 0, boxes), parts(piece, 1, boxes),
                                                     parts(piece, 2, boxes)};
    for (const Part& images : inside[0])
      for (const Part& rows : inside[1])
        for (const Part& columns : inside[2])
          copy_windows(piece, {images, rows, columns}, boxes.narrow(-1, 0, channels));
    return boxes.view({shape_.groups, volume(count) * volume(edge),
                       shape_.kernel.height * shape_.kernel.width * padded_channels});
  }

 private:
  // Blocks of a piece along one dimension, and the number of pixels copied of each.
  struct Part {
    int64_t first, count, edge;
  };

  // Cuts a piece along dimension d into the full blocks and the inner part of a last block that
  // sticks out of the grid. Zeroes the part that sticks out.
  std::vector<Part> parts(const Piece& piece, int d, const at::Tensor& boxes) const {
    const int64_t count = piece.count[d], edge = blocks_.edge[d];
    const int64_t inside =
        blocks_.grid[d] - (piece.first[d] + count - 1) * edge;  // of the last block
    if (inside >= edge) return {{0, count, edge}};
    boxes.narrow(1 + d, count - 1, 1).narrow(4 + d, inside, edge - inside).zero_();
    if (count == 1) return {{0, 1, inside}};
    return {{0, count - 1, edge}, {count - 1, 1, inside}};
  }

  void copy_windows(const Piece& piece, const std::array<Part, 3>& part,
                    const at::Tensor& boxes) const {
    // Input strides between neighbouring output pixels.
    const Box pixel = {source_.stride(0), source_.stride(1) * shape_.stride.height,
                       source_.stride(2) * shape_.stride.width};
    auto target = boxes;
    int64_t start = source_.storage_offset();
    for (int d = 0; d < 3; ++d) {
      target = target.narrow(1 + d, part[d].first, part[d].count).narrow(4 + d, 0, part[d].edge);
      start += (piece.first[d] + part[d].first) * blocks_.edge[d] * pixel[d];
    }
    const Box& edge = blocks_.edge;
    target.copy_(source_.as_strided(
        target.sizes(),
        {shape_.group_in_channels(), edge[0] * pixel[0], edge[1] * pixel[1], edge[2] * pixel[2],
         pixel[0], pixel[1], pixel[2], source_.stride(1) * shape_.dilation.height,
         source_.stride(2) * shape_.dilation.width, source_.stride(3)},
        start));
  }

  ConvShape shape_;
  PixelBlocks blocks_;
  int64_t block_k_;
  at::Tensor source_;  // (images, height, width, channels), padded
};

// ---- The stages ---------------------------------------------------------------------------------

// Copies the product of one piece, (groups, pixels, out_channels / groups), into the output.
void store(const Tensor& product, const Piece& piece, const PixelBlocks& blocks, const Tensor& to) {
  const auto& [c0, c1, c2] = piece.count;
  const auto& [e0, e1, e2] = blocks.edge;
  const Tensor boxes = product.view({product.size(0), c0, c1, c2, e0, e1, e2, product.size(2)})
                           .permute({1, 4, 2, 5, 3, 6, 0, 7});
  const Box covered = {c0 * e0, c1 * e1, c2 * e2};
  Box inside;
  Tensor target = to.permute({0, 2, 3, 1});
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

Tensor norms_of_weight_matrix(const Tensor& weight, int64_t groups, const Block& block) {
  return norm_map(weight_matrix(weight, groups, block.k), {block.m, block.k});
}

// A precomputed norm map of the weight matrix must have the shape that norm_map returns.
void check_norm_weight(const Convolution& conv) {
  if (!conv.norm_weight) return;
  const Tensor& norm = *conv.norm_weight;
  const auto [m, k, n] = conv.block;
  const ConvShape& shape = conv.shape;
  const int64_t depth = shape.kernel_positions() * blocks_of(shape.group_in_channels(), k);
  check_precomputed_norm_map(norm, {shape.groups, blocks_of(shape.group_out_channels(), m), depth},
                             conv.weight, {shape.groups, shape.group_out_channels(), depth * k},
                             "norm_weight");
}

// The convolution by an explicit im2col matrix. No dimension of the output is 0.
class MatrixConvolution {
 public:
  explicit MatrixConvolution(const Convolution& conv)
      : conv_(conv),
        weights_(weight_matrix(conv.weight, conv.shape.groups, conv.block.k)),
        norm_weight_(conv.norm_weight ? *conv.norm_weight
                                      : norm_map(weights_, {conv.block.m, conv.block.k})),
        im2col_(conv.input, conv.shape, conv.blocks, conv.block.k),
        pieces_(cut(conv.blocks.count(), pixel_blocks_at_once())) {}

  // The stages, piece by piece.
  Tensor run(const Knob& knob) const {
    const auto output = at::empty(conv_.output_sizes(), conv_.input.options(), conv_.output_format);
    const PartialBlockScale scale(conv_.blocks, norm_weight_.options());
    const auto threshold_for = [&](const Tensor& norm_b) {
      return threshold_from_knob(norm_weight_, norm_b, knob, scale(norm_b, 0));
    };
    OptTensor threshold = knob.tau;
    OptTensor norms;  // of all pieces, if the threshold depends on them
    if (!threshold && pieces_.size() > 1) {
      std::vector<Tensor> maps;
      maps.reserve(pieces_.size());
      for (const Piece& piece : pieces_) maps.push_back(norms_of(im2col_.transposed(piece)));
      norms = at::cat(maps, -1);
      threshold = threshold_for(*norms);
    }
    int64_t first = 0;  // the piece's first pixel block
    for (const Piece& piece : pieces_) {
      const Tensor pixels = im2col_.transposed(piece);
      const auto norm_b = norms ? norms->narrow(-1, first, volume(piece.count)) : norms_of(pixels);
      if (!threshold) threshold = threshold_for(norm_b);  // there is only one piece
      const Tensor product =
          multiply_piece(pixels, scale(norm_b, first).value_or(norm_b), *threshold);
      store(product, piece, conv_.blocks, output);
      first += volume(piece.count);
    }
    return apply_epilogue(output, conv_.residual, conv_.activation, conv_.slope);
  }

 private:
  // At least one is, however large. On a CPU a piece of the im2col matrix is still in cache when it
  // is multiplied; elsewhere it fills the device.
  int64_t pixel_blocks_at_once() const {
    const int64_t budget = int64_t{conv_.input.is_cpu() ? 8 : 256} << 20;  // bytes
    return budget / (conv_.shape.groups * conv_.block.n * std::max<int64_t>(weights_.size(2), 1) *
                     conv_.input.element_size());
  }

  // (groups, KB, NB), in the order of the pixel blocks.
  Tensor norms_of(const Tensor& pixels) const {
    return norm_map(pixels.mT(), {conv_.block.k, conv_.block.n});
  }

  // The kernel is that of the whole matrix, whatever the pieces, and its sums keep their order. If
  // a pixel block is of one image, which must not depend on its batch, it is that of one image.
  Tensor multiply_piece(const Tensor& pixels, const Tensor& skip_norms, const Tensor& tau) const {
    const auto [m, k, n] = conv_.block;
    const int64_t groups = conv_.shape.groups, channels = conv_.shape.group_out_channels();
    const Box blocks = conv_.blocks.count();
    const int64_t images = conv_.blocks.edge[0] == 1 ? blocks[0] : 1;
    MultiplyOptions options = {.whole = {{volume(blocks) / images * n, channels, 1}}};
    if (conv_.bias) options.input = conv_.bias->view({groups, 1, channels});
    return multiply(pixels, weights_.mT(), skip_norms.mT(), norm_weight_.mT(), tau, {n, k, m},
                    options);
  }

  const Convolution& conv_;
  Tensor weights_, norm_weight_;
  Im2col im2col_;
  std::vector<Piece> pieces_;
};

// The backend's result, its output with the whole epilogue.
ConvolutionResult run(const ConvBackend& backend, const Convolution& conv, const Knob& knob) {
  if (backend.fuses_epilogue(conv)) return backend.convolve.run(conv, knob);
  Convolution plain = conv;
  plain.residual.reset();
  plain.activation = Activation::kNone;
  plain.wants_output_norms = false;
  const Tensor output = backend.convolve.run(plain, knob).output;
  return {apply_epilogue(output, conv.residual, conv.activation, conv.slope), Tensor()};
}

// Tells whether torch's convolution takes its place. Blocks that the channels of a group do not
// fill are slow. Pixel blocks of one image promise independence of the batch, torch does not.
bool runs_dense(const Convolution& conv, const Knob& knob) {
  if (!skips_nothing(knob)) return false;
  if (conv.shape.groups > 1) return true;
  const auto* const choice = Backends<UnskippedBackend>::find(conv.input.device().type());
  return conv.blocks.edge[0] > 1 && choice != nullptr && !choice->own_pays(conv);
}

}  // namespace

at::Tensor weight_matrix(const Tensor& weight, int64_t groups, int64_t block_k) {
  const int64_t rows = weight.size(0) / groups, channels = weight.size(1);
  const int64_t padding = blocks_of(channels, block_k) * block_k - channels;
  const at::Tensor channels_last = weight.permute({0, 2, 3, 1});
  const Tensor padded = padding ? at::constant_pad_nd(channels_last, {0, padding}) : channels_last;
  return padded.reshape({groups, rows, weight.size(2) * weight.size(3) * (channels + padding)});
}

Convolution in_full_blocks(Convolution conv) {
  PixelBlocks& blocks = conv.blocks;
  PixelBlocks tried = blocks;
  for (int64_t images = blocks.edge[0]; images > 1;) {
    tried.edge = default_pixel_block(/*has_tau=*/false, images /= 2, conv.block.n);
    if (volume(tried.count()) < volume(blocks.count())) blocks = tried;
  }
  return conv;
}

ConvolutionResult convolve(const Convolution& conv, const Knob& given) {
  ConvolutionResult result;
  if (c10::multiply_integers(conv.output_sizes()) == 0) {
    result.output = at::empty(conv.output_sizes(), conv.input.options(), conv.output_format);
  } else if (runs_dense(conv, given)) {
    result.output = dense_convolution(conv);
  } else if (const Knob knob = checked_knob(given);
             const ConvBackend* const backend = Backends<ConvBackend>::find(
                 conv.input.device().type(), &ConvBackend::convolve, conv, knob)) {
    result = run(*backend, conv, knob);
  } else {
    result.output = MatrixConvolution(skips_nothing(knob) ? in_full_blocks(conv) : conv).run(knob);
  }
  if (conv.wants_output_norms && !result.norms.defined()) {
    const Tensor by_pixel = result.output.permute({2, 3, 0, 1});  // matrices (images, channels)
    const Tensor norms = norm_map(by_pixel, {kLayerNormBlock, kLayerNormBlock});
    result.norms = norms.permute({2, 0, 1, 3}).contiguous();
  }
  return {result.output.contiguous(conv.output_format), result.norms};
}

Convolution check_conv2d(const ConvArguments& x, bool wants_output_norms) {
  const Tensor& input = x.input;
  if (x.knob.tau) check_tau(*x.knob.tau, input.device());
  const ConvShape shape = check_convolution(x);
  const Block edges =
      conv_block(x.block, x.pixel_block, shape.group_out_channels(), shape.group_in_channels());
  const PixelBlocks blocks = {
      .grid = {shape.images, shape.output.height, shape.output.width},
      .edge = x.pixel_block
                  ? check_pixel_block(*x.pixel_block)
                  : default_pixel_block(x.knob.tau || x.knob.threshold, shape.images, edges.n)};
  const Convolution conv = {dense_arguments(x, shape, input.is_cuda() && allow_tf32()),
                            edges,
                            blocks,
                            x.norm_weight,
                            x.norm_input,
                            wants_output_norms};
  check_norm_weight(conv);
  if (x.norm_input) {
    check_precomputed_norm_map(*x.norm_input,
                               layer_norms_shape(shape.images, shape.input, shape.in_channels),
                               conv.input, conv.input.sizes(), "norm_input");
  }
  return conv;
}

namespace {

std::tuple<Tensor, Tensor> check_and_convolve(ConvArguments& x, bool wants_output_norms) {
  check_knob(x.knob);
  auto [output, norms] = convolve(check_conv2d(x, wants_output_norms), x.knob);
  return {x.input.dim() == 4 ? output : output.squeeze(0), norms};
}

Tensor conv2d_op(ConvArguments& x) { return std::get<0>(check_and_convolve(x, false)); }

std::tuple<Tensor, Tensor> conv2d_with_norms_op(ConvArguments& x) {
  return check_and_convolve(x, /*wants_output_norms=*/true);
}

std::string conv2d_backend_op(ConvArguments& x) {
  x.knob = checked_knob(x.knob);
  const Convolution conv = check_conv2d(x, /*wants_output_norms=*/false);
  if (runs_dense(conv, x.knob)) return x.input.is_cuda() ? "cudnn" : "onednn";
  const ConvBackend* const backend =
      Backends<ConvBackend>::find(x.input.device().type(), &ConvBackend::convolve, conv, x.knob);
  if (backend != nullptr && backend->name != nullptr) return backend->name;
  return backend_for(x.input.device(), x.input.scalar_type(),
                     {conv.block.m, conv.block.k, conv.block.n});
}

Tensor conv2d_weight_norm_op(const Tensor& weight, int64_t groups, at::OptionalIntArrayRef block,
                             at::OptionalIntArrayRef pixel_block) {
  check_conv_weight(weight, groups);
  const auto given = [](at::OptionalIntArrayRef edges) {
    return edges ? std::optional<DimVector>(*edges) : std::nullopt;
  };
  const Block edges =
      conv_block(given(block), given(pixel_block), weight.size(0) / groups, weight.size(1));
  const auto norms = Backends<ConvBackend>::run(weight.device().type(), &ConvBackend::weight_norms,
                                                weight, groups, edges);
  return norms ? *norms : norms_of_weight_matrix(weight, groups, edges);
}

}  // namespace

Tensor weight_norms(const Convolution& conv) {
  return conv.norm_weight ? *conv.norm_weight
                          : norms_of_weight_matrix(conv.weight, conv.shape.groups, conv.block);
}

TORCH_LIBRARY_IMPL(spamm_torch, CompositeExplicitAutograd, m) {
  m.impl("conv2d", boxed<&conv2d_op>());
  m.impl("conv2d_with_norms", boxed<&conv2d_with_norms_op>());
  m.impl("conv2d_backend", boxed<&conv2d_backend_op>());
  m.impl("conv2d_weight_norm", &conv2d_weight_norm_op);
}

}  // namespace spamm
