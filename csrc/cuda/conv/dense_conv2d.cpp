// Dense convolutions with ReLU: cuDNN adds bias and residual and rectifies in the convolution's own
// kernel. It is torch's call (ATen/native/cudnn/ConvShared.cpp), which torch.compile cannot trace.
#include <ATen/Context.h>
#include <c10/util/accumulate.h>

#include "conv/backend.h"

namespace spamm::cuda {
namespace {

using at::Tensor;

// cuDNN's fused kernels are for tensor cores. Half types with channels in units of 16 bytes alone
// take them: elsewhere, in TF32 as well, its ReLU turns NaN into zero. Offsets have 32 bits. With
// groups they convert more tensors than they save. Their call follows no setting of deterministic
// algorithms.
bool supports(const DenseConvolution& conv) {
  const at::Context& context = at::globalContext();
  const ConvShape& shape = conv.shape;
  const int64_t unit = 16 / conv.input.element_size();
  const int64_t outputs = c10::multiply_integers(shape.output_sizes());
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  return conv.activation == Activation::kRelu &&
         at::isReducedFloatingType(conv.input.scalar_type()) && shape.groups == 1 &&
         shape.in_channels % unit == 0 && shape.out_channels % unit == 0 &&
         std::max(conv.input.numel(), outputs) <= kMost && context.userEnabledCuDNN() &&
         !context.deterministicCuDNN() && !context.deterministicAlgorithms();
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

const Backends<DenseBackend> registered(at::kCUDA, Rank::kPortable,
                                        {.convolve = {&supports, &run}});

}  // namespace
}  // namespace spamm::cuda
