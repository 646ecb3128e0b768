// The parameters of a Hopper convolution's kernel, and the tensors they point to.
#pragma once

#include <ATen/core/Tensor.h>
#include <cuda_runtime.h>

#include "conv/backend.h"
#include "cuda/conv/norms_sm90.h"
#include "kernels/common/tile.h"
#include "kernels/conv/sm90/params.h"

namespace spamm::cuda {

class Arguments {
 public:
  kernels::conv::sm90::ConvParams params{};  // all but the operands
  at::Tensor output;

  // `options`: of input and output. `channels`: of the input, including its padding. `conv` must
  // outlive this object.
  Arguments(const Convolution& conv, const at::TensorOptions& options, int64_t channels);

  // Sets the norms, and computes the threshold from them.
  void set(const ConvNorms& norms, const NormUse& use, const Knob& knob, cudaStream_t stream);

  // For a knob that skips nothing: no norms but those of the weight, if they are given. They tell
  // where an infinite weight meets padding.
  void set_dense(const Knob& knob);

  // Chooses the tile, which it returns, and sets the segments of its steps. The box is known.
  // `dense`: nothing is skipped.
  kernels::TileSize choose(const Convolution& conv, bool dense, int multiprocessors);

  // Allocates an output of these sizes, which is the one of `conv` in another shape at most.
  void set_output(at::IntArrayRef sizes);

 private:
  const Convolution& conv_;
  at::TensorOptions output_options_;
  at::Tensor bias_, residual_, norm_weight_, norm_blocks_, tau_;
};

}  // namespace spamm::cuda
