// The norms of a Hopper convolution: of pixels, of the weight and of im2col blocks.
#pragma once

#include <ATen/core/Tensor.h>
#include <cuda_runtime.h>

#include "conv/backend.h"
#include "cuda/tiles.h"
#include "kernels/conv/sm90/params.h"

namespace spamm::cuda {

// The norms that the kernel reads, and its tile counter.
struct ConvNorms {
  at::Tensor weight;      // (1, MB, KB)
  at::Tensor pixels;      // (image blocks, rows, columns, channel groups)
  at::Tensor own_pixels;  // memory of the counter, and of `pixels` if not precomputed
  int* next_tile;         // zero when the kernel starts, or null
};

// Computes the norms that are not precomputed. One launch computes them all and sets the counter to
// zero, which im2col_block_norms() does if it follows (takes_block_norms()). `input` and `weight`
// are results of readable_pixels(), with elements of type Element. No knob: for norm maps alone.
template <class Element>
ConvNorms conv_norms(const Convolution& conv, const at::Tensor& input, const at::Tensor& weight,
                     TileSize tile, const Knob& knob, cudaStream_t stream);

// Whether there are precomputed norms of the input, in the blocks that this convolution needs.
bool has_input_norms(const Convolution& conv);

// Whether the kernel works by strips (kernels/conv/sm90/list_by_strip.cuh): deviations of half
// types with a tau on the host that skips products of zeros alone.
bool runs_by_strips(const Convolution& conv, const Knob& knob);

// Whether the convolution needs norms of im2col blocks: for a search, and for pixel blocks of
// several rows or columns, whose norms are not those of single pixels. By strips those do.
bool takes_block_norms(const Convolution& conv, const Knob& knob);

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
template <class Element>
void output_norms(const at::Tensor& output, const at::Tensor& norms, cudaStream_t stream);

}  // namespace spamm::cuda
