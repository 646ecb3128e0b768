// Convolutions and pools of deviations from a reference image: what the ops of this folder compute
// with, and what a device can implement for them. Elsewhere they are plain convolutions, torch's
// ops and passes of their own.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "backends.h"
#include "conv/backend.h"

namespace spamm {

// A convolution whose arguments have been checked: activation(conv + residual + base) -
// activation(base). It has no bias, and without an activation no base, because that cancels.
struct Deviation : Convolution {
  OptTensor base = {};             // one image of the output
  std::vector<Tensor> parts = {};  // of the input along its channels; `input` is the first
  std::vector<Tensor> norms = {};  // pixel_norms() of them, or none
  bool in_phases = false;          // the output's channels are [row][column][C] of 2 x 2 pixels

  bool is_whole() const { return parts.size() == 1 && !in_phases; }
};

// Output norms for convolutions whose pixel blocks are those of one image: one for each (image,
// pixel, 64 channels).
inline std::array<int64_t, 4> pixel_norms_shape(int64_t images, const Size2& size,
                                                int64_t channels) {
  return {images, size.height, size.width, blocks_of(channels, kLayerNormBlock)};
}

Tensor pixel_norms(const Tensor& images);

// How many neighbouring columns share a norm of an output that was in phases: 64 channels of the
// convolution are two columns of 32.
inline int64_t columns_of_norms(int64_t channels) {
  return 2 * channels == kLayerNormBlock ? 2 : 1;
}

// activation(output + residual + base) - activation(base), in place. Base has one image. Zero where
// output and residual are.
void apply_deviation_epilogue_(const Tensor& output, const OptTensor& residual, const Tensor& base,
                               Activation activation);

// Norms are pixel_norms(), undefined if they still need a norm pass.
struct ReferenceBackend {
  // Phases are put in their places, channels last, and then have norms of columns_of_norms()
  // columns together.
  Way<ConvolutionResult(const Deviation&, const Knob&)> convolve = {};
  // Concatenates images (N, C, H, W) of one size and type along their channels.
  Way<ConvolutionResult(at::TensorList parts)> join = {};
  // max(input + reference) - max(reference). The reference is one image. norm_input: norms of the
  // input, or of some columns together.
  Way<ConvolutionResult(const Tensor& input, const Tensor& reference, const OptTensor& norm_input,
                        const MaxPool& pool)>
      pool = {};
  // As apply_deviation_epilogue_. The result is the output.
  Way<Tensor(const Tensor& output, const OptTensor& residual, const Tensor& base,
             Activation activation)>
      epilogue = {};
};

// Refuses what cannot be concatenated.
void check_parts(at::TensorList parts);

}  // namespace spamm
