// Convolutions whose im2col matrix is never in memory: each device has them for some arguments.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <optional>

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
  std::optional<at::Tensor> norm_input;   // as layer_norms' of the input
  bool wants_output_norms;                // the output's, too
  bool weight_is_ready;                   // see kernels/common/overlap.cuh
  bool allow_tf32;                        // of float32 on CUDA, asked once for the whole call
};

// Norms that one layer leaves for the next: of every (block of 64 images, pixel, block of 64
// channels), float32. They are the norms of the next layer's im2col blocks, shifted by the kernel
// position, where its pixel block is (64, 1, 1) and its k is 64.
constexpr int64_t kLayerNormBlock = 64;

inline std::array<int64_t, 4> layer_norms_shape(int64_t images, const Size2& size,
                                                int64_t channels) {
  return {blocks_of(images, kLayerNormBlock), size.height, size.width,
          blocks_of(channels, kLayerNormBlock)};
}

// The norms that an output leaves for the next layer.
at::Tensor layer_norms(const at::Tensor& output);

struct ConvolutionResult {
  at::Tensor output, norms;  // the second undefined where it is not asked for, or not left
};

// A max pooling whose arguments have been checked.
struct MaxPool {
  Size2 kernel, stride, padding, dilation, output;
};

namespace cpu {

// Whether implicit_conv takes it.
bool has_implicit_conv(const Convolution& conv);

// Writes the convolution, whose weight has the norms `norm_weight`, into `output`, which is
// contiguous or channels last; without what follows it (relu, norms for the next layer).
void implicit_conv(const Convolution& conv, const Knob& knob, const at::Tensor& norm_weight,
                   const at::Tensor& output);

}  // namespace cpu

namespace cuda {

#ifdef SPAMM_WITH_CUDA
// On sm_80 and newer; whether implicit_conv_sm80 takes it, and should.
bool has_implicit_conv_sm80(const Convolution& conv);

// Writes the convolution of `weights`, (groups, out_channels / groups, K), whose norms are
// `norm_weight`, into `output`, which is contiguous or channels last; without norms for the next
// layer.
void implicit_conv_sm80(const Convolution& conv, const Knob& knob, const at::Tensor& weights,
                        const at::Tensor& norm_weight, const at::Tensor& output);
#endif

#ifdef SPAMM_WITH_SM90A
// On Hopper: whether implicit_conv takes it.
bool has_implicit_conv(const Convolution& conv);

// The output is in channels-last memory. float32 at full accuracy leaves no norms: the next
// layer reads its input anyway, to split it.
ConvolutionResult implicit_conv(const Convolution& conv, const Knob& knob);

// The same for few input channels where the threshold, held by the host, skips nothing.
bool has_few_channels_conv(const Convolution& conv, const Knob& knob);
ConvolutionResult few_channels_conv(const Convolution& conv);

// The norms (1, MB, KB) of a weight that implicit_conv would take itself, bit for bit, where they
// are not norm_map's of the weight matrix.
bool has_implicit_weight_norm(const at::Tensor& weight, int64_t groups, const Block& block);
at::Tensor implicit_weight_norm(const at::Tensor& weight, const Block& block);

// Whether max_pool takes it. Its output is in channels-last memory, as its input must be.
bool has_max_pool(const at::Tensor& input, const MaxPool& pool);
ConvolutionResult max_pool(const at::Tensor& input, const MaxPool& pool);
#endif

}  // namespace cuda

}  // namespace spamm
