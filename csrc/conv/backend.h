// Offers of a device for convolutions and max pooling, to be registered by backends.h.
//
// A device without a backend falls back on the explicit im2col matrix of conv2d.cpp, torch's max
// pooling and norm maps of whole tensors. The results are the same.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <optional>

#include "activation.h"
#include "arguments.h"
#include "backends.h"
#include "conv/shape.h"
#include "spamm/spamm.h"

namespace spamm {

// A dense convolution whose arguments have been checked: activation(conv + bias + residual).
struct DenseConvolution {
  at::Tensor input, weight;  // a batch, and (out_channels, in_channels / groups, height, width)
  std::optional<at::Tensor> bias, residual;  // residual: of the output's shape
  Activation activation;
  Slope slope;  // a tensor is of the norms' type
  ConvShape shape;
  bool allow_tf32;                 // for float32 on CUDA; read once per call
  at::MemoryFormat output_format;  // channels last or contiguous
};

// One that may skip.
struct Convolution : DenseConvolution {
  Block block = {};
  PixelBlocks blocks = {};
  std::optional<at::Tensor> norm_weight = {};  // (groups, MB, KB)
  std::optional<at::Tensor> norm_input = {};   // output_norms_of() the input
  bool wants_output_norms = false;

  std::array<int64_t, 4> output_sizes() const { return shape.output_sizes(); }
};

// Output norms that one layer passes on to the next: float32, one for each (64 images, pixel, 64
// channels). If the next layer's pixel block is (64, 1, 1) and its k is 64, these are the norms of
// its im2col blocks: the kernel position only selects another pixel.
constexpr int64_t kLayerNormBlock = 64;

inline std::array<int64_t, 4> layer_norms_shape(int64_t images, const Size2& size,
                                                int64_t channels) {
  return {blocks_of(images, kLayerNormBlock), size.height, size.width,
          blocks_of(channels, kLayerNormBlock)};
}

// Memory for them, for the output of `x`.
inline at::Tensor empty_layer_norms(const Convolution& x) {
  return at::empty(layer_norms_shape(x.shape.images, x.shape.output, x.shape.out_channels),
                   x.input.options().dtype(at::kFloat), at::MemoryFormat::Contiguous);
}

struct ConvolutionResult {
  at::Tensor output;  // in any memory format
  at::Tensor norms;   // output norms; undefined if they still need a norm pass
};

// A convolution that skips nothing in the blocks, of as many images or fewer, of which the fewest
// cover the output: they are no more than what is computed together.
Convolution in_full_blocks(Convolution conv);

// The weight matrix (groups, out_channels / groups, K), with K in the order of the im2col matrix.
at::Tensor weight_matrix(const at::Tensor& weight, int64_t groups, int64_t block_k);

// The norms of the weight matrix: the precomputed ones if there are any.
at::Tensor weight_norms(const Convolution& conv);

// Tells whether a kernel with bias and ReLU alone computes the epilogue.
inline bool is_at_most_relu(const Convolution& conv) {
  return !conv.residual &&
         (conv.activation == Activation::kNone || conv.activation == Activation::kRelu);
}

// Convolution without an im2col matrix in memory, and norms with its rounding.
struct ConvBackend {
  Way<ConvolutionResult(const Convolution&, const Knob&)> convolve = {};  // the output is not empty
  const char* name = nullptr;  // null: that of the multiply kernel for such blocks
  // Tells whether it computes the residual and the activation too. If not, it gets neither, and no
  // wish for output norms: all three follow in passes of their own.
  bool (*fuses_epilogue)(const Convolution&) = &is_at_most_relu;
  // The norms (1, MB, KB) of a weight, where they are not norm_map's. Pinned norms must match those
  // of the convolution bit for bit.
  Way<at::Tensor(const at::Tensor& weight, int64_t groups, const Block& block)> weight_norms = {};
};

// The choice between torch's convolution and those of ConvBackend where nothing is skipped.
struct UnskippedBackend {
  // Tells whether the latter are faster: by the batch's sizes alone, so that bits never change.
  bool (*own_pays)(const Convolution&) = nullptr;
};

// A max pooling whose arguments have been checked.
struct MaxPool {
  Size2 kernel, stride, padding, dilation, output;
  bool ceil_mode;
};

// Layers that skip nothing. The outputs of convolutions are not empty, and in any memory format.
struct DenseBackend {
  Way<at::Tensor(const DenseConvolution&)> convolve = {};  // the weight is not empty either
  // And max pooling of 2 x 2 pixels, with stride 2. The result has the bits of one after the other.
  Way<at::Tensor(const Convolution&, const Knob&)> convolve_and_pool = {};
  Way<at::Tensor(const at::Tensor& input, const MaxPool& pool)> pool = {};
};

// One layer, for ops made of several. Arguments have been checked, but for those of check_conv2d.

// `x.knob` has been checked.
Convolution check_conv2d(const ConvArguments& x, bool wants_output_norms);

// The output is a batch, in conv.output_format. Norms are undefined unless conv.wants_output_norms.
ConvolutionResult convolve(const Convolution& conv, const Knob& knob);

// The output, a batch in output_format: by the device's backend, else by torch's and the epilogue.
Tensor dense_convolution(const DenseConvolution& conv);

// The arguments that a layer has without skipping, as a batch.
DenseConvolution dense_arguments(const ConvArguments& x, const ConvShape& shape, bool allow_tf32);

// The end of a convolution, for backends that do not compute all of it: adds the residual, if there
// is one, and applies the activation, in place but for slopes in a tensor. Each step rounds to
// the output's type, these slopes too. ReLU keeps NaN, as torch's does.
Tensor apply_epilogue(const Tensor& output, const OptTensor& residual, Activation activation,
                      const Slope& slope);

}  // namespace spamm
