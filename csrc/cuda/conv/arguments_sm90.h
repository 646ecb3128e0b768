// The parameters of a Hopper convolution's kernel, and the tensors they point to.
#pragma once

#include <ATen/core/Tensor.h>
#include <cuda_runtime.h>

#include "conv/backend.h"
#include "cuda/conv/norms_sm90.h"
#include "kernels/conv/sm90/params.h"

namespace spamm::cuda {

class Arguments {
 public:
  kernels::conv::sm90::ConvParams params{};  // without the operands
  at::Tensor output;

  // Of an input as readable_pixels() gives it. `conv` must outlive this.
  Arguments(const Convolution& conv, const at::Tensor& input);

  // The norms, the threshold that follows from them, and the output.
  void set(const ConvNorms& norms, const Knob& knob, cudaStream_t stream);

 private:
  const Convolution& conv_;
  at::TensorOptions output_options_;
  at::Tensor bias_, tau_;
  at::Tensor norm_blocks_;  // where a search wants them, or a shifted look-up will not do
};

}  // namespace spamm::cuda
