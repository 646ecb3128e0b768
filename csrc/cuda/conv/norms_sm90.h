// The norms that a Hopper convolution decides by: of pixels, of the weight and of im2col blocks.
#pragma once

#include <ATen/core/Tensor.h>
#include <cuda_runtime.h>

#include "conv/backend.h"
#include "cuda/tiles.h"
#include "kernels/conv/sm90/params.h"

namespace spamm::cuda {

// Norms as the kernel reads them, and the counter of its tiles.
struct ConvNorms {
  at::Tensor weight;      // (1, MB, KB)
  at::Tensor pixels;      // (image blocks, rows, columns, channel groups)
  at::Tensor own_pixels;  // owns the counter, and `pixels` where those were computed here
  int* next_tile;         // zero when the kernel begins, or null
};

// Computes the norms that the caller has not given, all in one launch, which also sets the counter
// to zero. Element: what the kernel multiplies, of `input` and `weight` from readable_pixels().
template <class Element>
ConvNorms conv_norms(const Convolution& conv, const at::Tensor& input, const at::Tensor& weight,
                     TileSize tile, cudaStream_t stream);

// Whether the given norms of the input are those of this convolution's pixels.
bool has_input_norms(const Convolution& conv);

// A channels-last tensor as a batch of matrices (images x channels), one for each pixel.
at::Tensor by_pixel(const at::Tensor& x);

// norm_map's norms (blocks of rows, pixels, blocks of channels) of by_pixel().
at::Tensor pixel_map(const at::Tensor& by_pixel, int64_t rows, int64_t channels);

// Norms (pixel blocks, KB) of the im2col matrix, from those of pixels.
at::Tensor im2col_block_norms(const Convolution& conv,
                              const kernels::conv::sm90::ConvParams& params, const ConvNorms& norms,
                              cudaStream_t stream);

// Computes the norms of an output for the next layer, where the convolution's kernel could not.
template <class Element>
void output_norms(const at::Tensor& output, const at::Tensor& norms, cudaStream_t stream);

}  // namespace spamm::cuda
