// Dense convolutions by oneDNN, whose call takes weights that are packed in its own layout, and
// applies activations to the sums before it rounds them: the call that torch.compile makes of both.
// Activations are faster so for channels-last tensors alone (docs/kernels/conv.md). oneDNN's relu
// and relu6 turn NaN into 0, and are not used.
#include <ATen/Context.h>
#include <ATen/core/List.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/accumulate.h>

#include "conv/layers.h"

namespace spamm::cpu {
namespace {

using at::IntArrayRef;
using at::Tensor;
using Scalars = c10::List<std::optional<at::Scalar>>;

using Pointwise = Tensor(const Tensor& input, const Tensor& weight,
                         const std::optional<Tensor>& bias, IntArrayRef padding, IntArrayRef stride,
                         IntArrayRef dilation, int64_t groups, std::string_view attr,
                         Scalars scalars, std::optional<std::string_view> algorithm);

// torch's op, in builds of torch with oneDNN.
std::optional<c10::OperatorHandle> find_pointwise() {
  static const auto op =
      c10::Dispatcher::singleton().findSchema({"mkldnn::_convolution_pointwise", ""});
  return op;
}

// oneDNN's name of an activation, or null.
const char* attribute_of(Activation activation) {
  switch (activation) {
    case Activation::kHardswish:
      return "hardswish";
    case Activation::kSilu:
      return "swish";
    default:
      return nullptr;
  }
}

// Of fewer outputs the call costs more than a second pass.
constexpr int64_t kLeastOutputs = int64_t{1} << 18;

bool supports(const DenseConvolution& conv) {
  if (conv.weight.is_mkldnn()) return true;
  return attribute_of(conv.activation) != nullptr && !conv.residual &&
         conv.input.scalar_type() == at::kFloat &&
         conv.output_format == at::MemoryFormat::ChannelsLast &&
         c10::multiply_integers(conv.shape.output_sizes()) >= kLeastOutputs &&
         at::globalContext().userEnabledMkldnn() && find_pointwise();
}

Tensor run(const DenseConvolution& conv) {
  const ConvShape& shape = conv.shape;
  const char* const attribute = conv.residual ? nullptr : attribute_of(conv.activation);
  const Tensor output = find_pointwise()->typed<Pointwise>().call(
      conv.input, conv.weight, conv.bias, shape.padding.pair(), shape.stride.pair(),
      shape.dilation.pair(), shape.groups, attribute ? attribute : "none", Scalars(), "");
  apply_epilogue_(output, conv.residual, attribute ? Activation::kNone : conv.activation);
  return output;
}

const Backends<DenseBackend> registered(at::kCPU, Rank::kPortable, {.convolve = {&supports, &run}});

}  // namespace
}  // namespace spamm::cpu
