// A convolution's sizes in the types of kernels, most of them Hopper's; the norms of a Hopper
// convolution (norms_sm90.cpp): of pixels, of the weight and of im2col blocks; the parameters of
// its kernel, and the boxes of pixels that it works on.
#pragma once

#include <ATen/core/Tensor.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>

#include "block.h"
#include "conv/backend.h"
#include "cuda/heuristics.h"
#include "cuda/operand.h"
#include "kernels/common/tile.h"
#include "kernels/conv/sm90/params.h"

namespace spamm::cuda {

// ---- Sizes -------------------------------------------------------------------------------------

// Offsets, coordinates and numbers of tiles are 32 bits wide. The margin allows steps past the end.
constexpr int64_t kMost = (int64_t{1} << 31) - 1024;

inline bool is_half(at::ScalarType dtype) { return dtype == at::kHalf || dtype == at::kBFloat16; }

// Half types, and float32 where TF32's precision is allowed.
inline bool is_of_hopper_type(const Convolution& conv) {
  const at::ScalarType dtype = conv.input.scalar_type();
  return is_half(dtype) || (dtype == at::kFloat && conv.allow_tf32);
}

template <class Launch>
Launch* of_type(at::ScalarType dtype, Launch* f16, Launch* bf16, Launch* f32) {
  return dtype == at::kHalf ? f16 : dtype == at::kBFloat16 ? bf16 : f32;
}

inline kernels::Size2 size2(const Size2& size) {
  return {static_cast<int>(size.height), static_cast<int>(size.width)};
}

inline kernels::conv::sm90::Extent extent(int64_t images, const Size2& size) {
  return {static_cast<int>(images), static_cast<int>(size.height), static_cast<int>(size.width)};
}

inline kernels::conv::sm90::Log2Block log2_block(const Box& edge) {
  return {log2_of(edge[0]), log2_of(edge[1]), log2_of(edge[2])};
}

// Channels covered by one norm. A block of 32 holds all channels and is padded to 64.
inline int log2_group(const Block& block) { return std::max(log2_of(block.k), 6); }

// Tells whether kernels support a block's m and k: 64 or 128, or 32 if a block holds all channels.
inline bool supports_channels(const Block& block, int64_t out_channels, int64_t in_channels) {
  return (block.m >= 64 || out_channels <= block.m) && (block.k >= 64 || in_channels <= block.k);
}

// Tells whether the Hopper kernels run on the input's device and support the convolution's sizes;
// its blocks too; and whether TMA can load them as boxes.
bool sizes_fit_hopper(const Convolution& conv);
bool fits_hopper(const Convolution& conv);
bool fits_boxes(const Convolution& conv);

// Tells whether the kernel of few input channels (few_channels.cuh) takes it.
bool has_few_channels(const Convolution& conv, const Knob& knob);

// `channels`: channels of the input, including its padding.
inline kernels::conv::sm90::ConvShape kernel_shape(const spamm::ConvShape& shape,
                                                   int64_t channels) {
  return {.input = extent(shape.images, shape.input),
          .output = extent(shape.images, shape.output),
          .channels = static_cast<int>(channels),
          .out_channels = static_cast<int>(shape.out_channels),
          .kernel = size2(shape.kernel),
          .stride = size2(shape.stride),
          .padding = size2(shape.padding),
          .dilation = size2(shape.dilation)};
}

// The answers to heuristics.h where nothing is skipped.
inline UnskippedConv unskipped_size(const Convolution& conv) {
  const spamm::ConvShape& shape = conv.shape;
  return {.images = shape.images,
          .in_channels = shape.in_channels,
          .out_channels = shape.out_channels,
          .positions = shape.kernel_positions(),
          .in_pixels = shape.input.height * shape.input.width,
          .out_pixels = shape.output.height * shape.output.width};
}

inline kernels::conv::sm90::Slopes slopes_of(const Convolution& conv) {
  const auto& [number, tensor] = conv.slope;
  return {.first = tensor ? tensor->const_data_ptr<float>() : nullptr,
          .step = tensor && tensor->numel() > 1,
          .number = static_cast<float>(number)};
}

// ---- Norms --------------------------------------------------------------------------------------

// The norms that the kernel reads, and its tile counter.
struct ConvNorms {
  at::Tensor weight;      // (1, MB, KB)
  at::Tensor pixels;      // (image blocks, rows, columns, channel groups)
  at::Tensor own_pixels;  // memory of the counter, and of `pixels` if not precomputed
  int* next_tile;         // zero when the kernel starts, or null
};

// The norms that a convolution reads.
struct NormUse {
  std::optional<at::Tensor> input;  // precomputed ones, in the blocks that it needs
  // Norms of im2col blocks: for a search, and for pixel blocks of several rows or columns, whose
  // norms are not those of single pixels.
  bool by_block;
};
NormUse norm_use(const Convolution& conv, const Knob& knob);

cudaError_t launch_norms(at::ScalarType dtype, const kernels::conv::sm90::PixelNormsParams& params,
                         cudaStream_t stream);

// Its job for a weight, a result of readable_pixels(), and the shape of that one's norms.
kernels::conv::sm90::PixelNormsJob weight_job(const at::Tensor& weight, const Block& block,
                                              const at::Tensor& norms);
std::array<int64_t, 3> weight_norms_shape(const at::Tensor& weight, const Block& block);

// The norms of a weight for TF32: norm_map's, so that pinned ones do not depend on torch's setting.
at::Tensor norm_map_of_weight(const at::Tensor& weight, const Block& block);

// A channels-last tensor as a batch of matrices (images x channels), one for each pixel.
at::Tensor by_pixel(const at::Tensor& x);

// norm_map of by_pixel(), as (blocks of rows, pixels, blocks of channels).
at::Tensor pixel_map(const at::Tensor& by_pixel, int64_t rows, int64_t channels);

// Norms (pixel blocks, KB) of the im2col matrix, computed from those of pixels.
at::Tensor im2col_block_norms(const Convolution& conv,
                              const kernels::conv::sm90::ConvParams& params, const ConvNorms& norms,
                              cudaStream_t stream);

// Output norms by a norm pass, for convolutions whose kernel cannot compute them.
void output_norms(const at::Tensor& output, const at::Tensor& norms, cudaStream_t stream);

// Norms (image blocks, rows, columns) under a held tau, where all channels are one block.
at::Tensor held_pixel_norms(const Convolution& conv, const at::Tensor& input, const Knob& knob);

// ---- Parameters ---------------------------------------------------------------------------------

// Dense mode: nothing is skipped but padding, and no norms are taken. This is the same convolution
// with the pixel blocks that suit it, because which pixels share a block changes no bit of the
// result then. A 1 x 1 convolution becomes one of a single line of pixels, so that a block has
// neighbours in memory; its sizes are no longer those of its tensors.
Convolution in_dense_mode(Convolution conv);

// For pixel blocks of one pixel that more than half lack images: the box of several pixels of all
// images that fills tiles better. Each pixel is then judged by itself, as its block demands.
std::optional<Box> box_of_several_pixels(const Convolution& conv);

// Parameters and the tensors they point to: operands, choice, norms, threshold, output, in order.
class Arguments {
 public:
  kernels::conv::sm90::ConvParams params{};  // all but the maps
  at::Tensor input, weight, output;
  ConvChoice choice{};

  // `input`, `weight`: those of `conv` as the kernel reads them. `conv` must outlive this object.
  Arguments(const Convolution& conv, at::Tensor input, at::Tensor weight);

  // Chooses tile and segments. The box is known. `use` is null where nothing is skipped.
  void choose(const Convolution& conv, const NormUse* use, int multiprocessors);

  // Takes the norms that are not precomputed, and the threshold from them. One launch computes all
  // and sets the tile counter to zero, which im2col_block_norms() does if it follows.
  void take_norms(const NormUse& use, const Knob& knob, cudaStream_t stream);

  // Sets the norms, and computes the threshold from them.
  void set(const ConvNorms& norms, const NormUse& use, const Knob& knob, cudaStream_t stream);

  // For a knob that skips nothing: no norms but those of the weight, if they are given. They tell
  // where an infinite weight meets padding.
  void set_dense(const Knob& knob);

  // Allocates an output of these sizes, which is the one of `conv` in another shape at most.
  void set_output(at::IntArrayRef sizes);

  kernels::Launch launch(int multiprocessors, cudaStream_t stream) const {
    return {.tile = choice.tile, .multiprocessors = multiprocessors, .stream = stream};
  }

 private:
  ConvNorms norms_of(const NormUse& use, cudaStream_t stream) const;

  const Convolution& conv_;
  ConvNorms norms_;  // the kernel reads them, and its tile counter is in their memory
  at::Tensor bias_, residual_, norm_weight_, norm_blocks_, valid_pixels_;
  Threshold tau_;
};

}  // namespace spamm::cuda
