// The norms of a Hopper convolution: of pixels, of the weight and of im2col blocks.
#pragma once

#include <ATen/core/Tensor.h>
#include <cuda_runtime.h>

#include <array>
#include <optional>

#include "conv/backend.h"
#include "kernels/conv/sm90/params.h"

namespace spamm::cuda {

// The norms that the kernel reads, and its tile counter.
struct ConvNorms {
  at::Tensor weight;      // (1, MB, KB)
  at::Tensor pixels;      // (image blocks, rows, columns, channel groups)
  at::Tensor own_pixels;  // memory of the counter, and of `pixels` if not precomputed
  int* next_tile;         // zero when the kernel starts, or null
};

// Which norms a convolution reads.
struct NormUse {
  std::optional<at::Tensor> input;  // precomputed ones, in the blocks that it needs
  // Norms of im2col blocks: for a search, and for pixel blocks of several rows or columns, whose
  // norms are not those of single pixels.
  bool by_block;
  bool tiles_differ = false;  // many tiles have no step at all
};
NormUse norm_use(const Convolution& conv, const Knob& knob);

// The launch of the kernel that computes norms of pixels, for a type.
cudaError_t launch_norms_of_pixels(at::ScalarType dtype,
                                   const kernels::conv::sm90::PixelNormsParams& params,
                                   cudaStream_t stream);

// Its job for a weight, a result of readable_pixels(), and the shape of that one's norms.
kernels::conv::sm90::PixelNormsJob weight_job(const at::Tensor& weight, const Block& block,
                                              const at::Tensor& norms);
std::array<int64_t, 3> weight_norms_shape(const at::Tensor& weight, const Block& block);

// The norms of a weight for TF32: those of norm_map, so that pinned norms do not depend on
// PyTorch's setting.
at::Tensor norm_map_of_weight(const at::Tensor& weight, const Block& block);

// A channels-last tensor as a batch of matrices (images x channels), one for each pixel.
at::Tensor by_pixel(const at::Tensor& x);

// norm_map of by_pixel(), as (blocks of rows, pixels, blocks of channels).
at::Tensor pixel_map(const at::Tensor& by_pixel, int64_t rows, int64_t channels);

// Norms (pixel blocks, KB) of the im2col matrix, computed from those of pixels.
at::Tensor im2col_block_norms(const Convolution& conv,
                              const kernels::conv::sm90::ConvParams& params, const ConvNorms& norms,
                              cudaStream_t stream);

// The same with those of the weight, as norm maps.
ConvNormMaps conv_norm_maps(const Convolution& conv, const kernels::conv::sm90::ConvParams& params,
                            const ConvNorms& norms, cudaStream_t stream);

// Output norms by a norm pass, for convolutions whose kernel cannot compute them.
void output_norms(const at::Tensor& output, const at::Tensor& norms, cudaStream_t stream);

}  // namespace spamm::cuda
