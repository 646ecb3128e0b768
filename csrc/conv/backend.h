// Convolutions and what goes with them, as a device's backends take them (backends.h).
//
// A device without a backend gets the explicit im2col matrix of conv2d.cpp, torch's own max pooling
// and norm maps of whole tensors: results are the same.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <optional>

#include "backends.h"
#include "conv/pixel_blocks.h"
#include "conv/shape.h"
#include "spamm/spamm.h"

namespace spamm {

// A convolution whose arguments have been checked.
struct Convolution {
  at::Tensor input, weight;  // a batch, and (out_channels, in_channels / groups, height, width)
  std::optional<at::Tensor> bias;
  bool relu;
  ConvShape shape;
  Block block;
  PixelBlocks blocks;
  std::optional<at::Tensor> norm_weight;  // (groups, MB, KB)
  std::optional<at::Tensor> norm_input;   // as layer_norms() of the input
  bool wants_output_norms;
  bool weight_is_ready;            // see kernels/common/overlap.cuh
  bool allow_tf32;                 // for float32 on CUDA, asked once for the whole call
  at::MemoryFormat output_format;  // channels last or contiguous

  std::array<int64_t, 4> output_sizes() const {
    return {shape.images, shape.out_channels, shape.output.height, shape.output.width};
  }
};

// Norms that one layer passes on to the next: of every (block of 64 images, pixel, block of 64
// channels), float32. They are the norms of the next layer's im2col blocks, shifted by the kernel
// position, where its pixel block is (64, 1, 1) and its k is 64.
constexpr int64_t kLayerNormBlock = 64;

inline std::array<int64_t, 4> layer_norms_shape(int64_t images, const Size2& size,
                                                int64_t channels) {
  return {blocks_of(images, kLayerNormBlock), size.height, size.width,
          blocks_of(channels, kLayerNormBlock)};
}

// These norms of an output, in a pass over it.
at::Tensor layer_norms(const at::Tensor& output);

struct ConvolutionResult {
  at::Tensor output;  // in any memory format
  at::Tensor norms;   // layer_norms() of it; undefined where a pass over it must compute them
};

// The norms of the weight: the caller's, or those of the weight matrix.
at::Tensor weight_norms(const Convolution& conv);

// A convolution whose im2col matrix is never in memory.
struct ConvBackend {
  bool (*takes)(const Convolution&, const Knob&);  // the output is not empty
  ConvolutionResult (*run)(const Convolution&, const Knob&);
};

// The norms (1, MB, KB) of a weight as the device's convolution computes them, where those are not
// bit for bit norm_map's of the weight matrix.
struct WeightNormBackend {
  bool (*takes)(const at::Tensor& weight, int64_t groups, const Block& block);
  at::Tensor (*run)(const at::Tensor& weight, const Block& block);
};

// A max pooling whose arguments have been checked.
struct MaxPool {
  Size2 kernel, stride, padding, dilation, output;
};

struct MaxPoolBackend {
  bool (*takes)(const at::Tensor& input, const MaxPool& pool);
  ConvolutionResult (*run)(const at::Tensor& input, const MaxPool& pool);
};

// Takes the devices and types whose convolutions compute their output's norms without a pass over
// it: there a chain of layers pays.
struct OutputNormsBackend {
  bool (*takes)(at::Device device, at::ScalarType dtype);
};

}  // namespace spamm
