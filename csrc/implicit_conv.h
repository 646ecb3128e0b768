// Convolutions whose im2col matrix is never in memory: each device has them for some arguments.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "conv_shape.h"
#include "pixel_blocks.h"
#include "spamm/spamm.h"

namespace spamm {

// A convolution whose arguments have been checked.
struct Convolution {
  at::Tensor input, weight;  // a batch, and (out_channels, in_channels / groups, height, width)
  std::optional<at::Tensor> bias;
  ConvShape shape;
  Block block;
  PixelBlocks blocks;
  std::optional<at::Tensor> norm_weight;  // (groups, MB, KB)
};

namespace cpu {

// Whether implicit_conv takes it.
bool has_implicit_conv(const Convolution& conv);

// Writes the convolution, whose weight has the norms `norm_weight`, into `output`, which is
// contiguous or channels last.
void implicit_conv(const Convolution& conv, const Knob& knob, const at::Tensor& norm_weight,
                   const at::Tensor& output);

}  // namespace cpu
}  // namespace spamm
