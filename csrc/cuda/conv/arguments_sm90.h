// The parameters of a Hopper convolution's kernel, and the boxes of pixels that it works on.
#pragma once

#include <ATen/core/Tensor.h>
#include <cuda_runtime.h>

#include <optional>

#include "conv/backend.h"
#include "cuda/conv/norms_sm90.h"
#include "cuda/heuristics.h"
#include "kernels/common/tile.h"
#include "kernels/conv/sm90/params.h"

namespace spamm::cuda {

// Dense mode: nothing is skipped but padding, and no norms are taken. This is the same convolution
// with the pixel blocks that suit it, because which pixels share a block changes no bit of the
// result then. A 1 x 1 convolution becomes one of a single line of pixels, so that a block has
// neighbours in memory; its sizes are no longer those of its tensors.
Convolution in_dense_mode(Convolution conv);

// For pixel blocks of one pixel that more than half lack images: the box of several pixels of all
// images that fills tiles better. Each pixel is then judged by itself, as its block demands.
std::optional<Box> box_of_several_pixels(const Convolution& conv);

// The parameters and the tensors they point to: operands, what was chosen, norms, threshold and
// output, in this order.
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

  // The norm maps with which it searches a threshold.
  ConvNormMaps norm_maps(cudaStream_t stream);

  kernels::Launch launch(int multiprocessors, cudaStream_t stream) const {
    return {.tile = choice.tile, .multiprocessors = multiprocessors, .stream = stream};
  }

 private:
  ConvNorms norms_of(const NormUse& use, cudaStream_t stream) const;

  const Convolution& conv_;
  ConvNorms norms_;  // the kernel reads them, and its tile counter is in their memory
  at::Tensor bias_, residual_, norm_weight_, norm_blocks_, tau_;
};

}  // namespace spamm::cuda
