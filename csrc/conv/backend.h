// What a device can implement for convolutions and max pooling, to be registered by backends.h.
//
// A device without a backend falls back on the explicit im2col matrix of conv2d.cpp, torch's max
// pooling and norm maps of whole tensors. The results are the same.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <optional>

#include "activation.h"
#include "backends.h"
#include "conv/pixel_blocks.h"
#include "conv/shape.h"
#include "spamm/spamm.h"

namespace spamm {

// A convolution whose arguments have been checked: activation(conv + bias + residual), or with a
// base activation(conv + residual + base) - activation(base) for deviations. The input
// may be a part of a batch, cut where a pixel block ends. The size of the batch then chooses the
// kernel, because different ones round differently.
struct Convolution {
  at::Tensor input, weight;  // a batch, and (out_channels, in_channels / groups, height, width)
  std::optional<at::Tensor> bias, residual;  // residual: of the output's shape
  Activation activation;
  ConvShape shape;
  Block block;
  PixelBlocks blocks;
  std::optional<at::Tensor> norm_weight;  // (groups, MB, KB)
  std::optional<at::Tensor> norm_input;   // output_norms_of() the input
  bool wants_output_norms;
  bool weight_is_ready;                           // see kernels/common/overlap.cuh
  bool allow_tf32;                                // for float32 on CUDA; read once per call
  at::MemoryFormat output_format;                 // channels last or contiguous
  int64_t whole_images;                           // of the batch
  std::optional<at::Tensor> base = std::nullopt;  // one image, with an activation; there is no bias
  bool is_deviation = false;                      // conv2d_deviation's, with a base or without

  PixelBlocks whole_blocks() const {
    PixelBlocks all = blocks;
    all.grid[0] = whole_images;
    return all;
  }

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

// Output norms, computed by a norm pass.
at::Tensor layer_norms(const at::Tensor& output);

// The same for deviations, whose pixel blocks are those of one image: one for each (image, pixel,
// 64 channels).
inline std::array<int64_t, 4> pixel_norms_shape(int64_t images, const Size2& size,
                                                int64_t channels) {
  return {images, size.height, size.width, blocks_of(channels, kLayerNormBlock)};
}
at::Tensor pixel_norms(const at::Tensor& output);

struct ConvolutionResult {
  at::Tensor output;  // in any memory format
  at::Tensor norms;   // output norms; undefined if they still need a norm pass
};

// The norms of the weight matrix: the precomputed ones if there are any.
at::Tensor weight_norms(const Convolution& conv);

// The norm maps of a convolution's matrices.
struct ConvNormMaps {
  at::Tensor weight;  // (groups, MB, KB)
  at::Tensor pixels;  // (groups, KB, NB), in the order of the pixel blocks; not yet skip norms
};

// What a kernel with bias and ReLU alone computes of an epilogue.
inline bool is_at_most_relu(const Convolution& conv) {
  return !conv.residual &&
         (conv.activation == Activation::kNone || conv.activation == Activation::kRelu);
}

// Convolution without an im2col matrix in memory.
struct ConvBackend {
  bool (*supports)(const Convolution&, const Knob&);  // the output is not empty
  ConvolutionResult (*run)(const Convolution&, const Knob&);
  // The norm maps with which run() searches a threshold, bit for bit. Null if it never does.
  ConvNormMaps (*norm_maps)(const Convolution&);
  // Whether run() computes the residual and the activation too. If not, it gets neither, and no
  // wish for output norms: all three follow in passes of their own.
  bool (*fuses_epilogue)(const Convolution&) = &is_at_most_relu;
  // The same for a base and for the norms of deviations.
  bool (*fuses_base)(const Convolution&) = [](const Convolution&) { return false; };
};

// The norms (1, MB, KB) of a weight, for a device whose convolution computes them with rounding
// other than norm_map's. Pinned norms must match them bit for bit.
struct WeightNormBackend {
  bool (*supports)(const at::Tensor& weight, int64_t groups, const Block& block);
  at::Tensor (*run)(const at::Tensor& weight, const Block& block);
};

// A max pooling whose arguments have been checked.
struct MaxPool {
  Size2 kernel, stride, padding, dilation, output;
};

// The pooling of deviations: max(input + reference) - max(reference), with pixel_norms(). The
// reference is one image. norm_input: pixel_norms() of the input, or of some columns together.
struct DeviationPoolBackend {
  bool (*supports)(const at::Tensor& input, const at::Tensor& reference, const MaxPool& pool);
  ConvolutionResult (*run)(const at::Tensor& input, const at::Tensor& reference,
                           const std::optional<at::Tensor>& norm_input, const MaxPool& pool);
};

// The result's norms are defined if they are wanted.
struct MaxPoolBackend {
  bool (*supports)(const at::Tensor& input, const MaxPool& pool, bool wants_output_norms);
  ConvolutionResult (*run)(const at::Tensor& input, const MaxPool& pool);
};

// Supports the devices and types whose convolutions compute output norms without a norm pass.
struct OutputNormsBackend {
  bool (*supports)(at::Device device, at::ScalarType dtype);
};

// Bytes of the explicit im2col matrix that a device wants at a time.
struct Im2colBudget {
  int64_t bytes;

  bool supports() const { return true; }
};

}  // namespace spamm
