// Dense convolutions with ReLU: cuDNN adds bias and residual and rectifies in the convolution's own
// kernel. It is torch's call (ATen/native/cudnn/ConvShared.cpp), which torch.compile cannot trace.
#include "conv/dense_conv2d.h"

#include <ATen/Context.h>
#include <ATen/ops/cudnn_convolution_add_relu.h>
#include <ATen/ops/cudnn_convolution_relu.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <limits>

namespace spamm::cuda {
namespace {

using at::Tensor;

// cuDNN's fused kernels are for tensor cores: half types and TF32, output channels, and those of a
// group, in units of 16 bytes, offsets of 32 bits. Their call follows cuDNN's setting of TF32, and
// no setting of deterministic algorithms.
bool supports(const DenseConvolution& conv) {
  const at::Context& context = at::globalContext();
  const ConvShape& shape = conv.shape;
  const at::ScalarType dtype = conv.input.scalar_type();
  const int64_t unit = 16 / conv.input.element_size();
  const int64_t outputs = c10::multiply_integers(shape.output_sizes());
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  const bool is_tf32 =
      dtype == at::kFloat && conv.allow_tf32 && context.allowTF32CuDNN(at::Float32Op::CONV);
  return conv.activation == Activation::kRelu && (at::isReducedFloatingType(dtype) || is_tf32) &&
         (shape.groups == 1 || shape.group_in_channels() % unit == 0) &&
         shape.group_out_channels() % unit == 0 && std::max(conv.input.numel(), outputs) <= kMost &&
         context.userEnabledCuDNN() && !context.deterministicCuDNN() &&
         !context.deterministicAlgorithms();
}

Tensor run(const DenseConvolution& conv) {
  const ConvShape& shape = conv.shape;
  const auto stride = shape.stride.pair(), padding = shape.padding.pair(),
             dilation = shape.dilation.pair();
  if (!conv.residual) {
    return at::cudnn_convolution_relu(conv.input, conv.weight, conv.bias, stride, padding, dilation,
                                      shape.groups);
  }
  return at::cudnn_convolution_add_relu(conv.input, conv.weight, *conv.residual, /*alpha=*/1,
                                        conv.bias, stride, padding, dilation, shape.groups);
}

const Backends<DenseConvBackend> registered(at::kCUDA, Rank::kPortable, {&supports, &run});

}  // namespace
}  // namespace spamm::cuda
