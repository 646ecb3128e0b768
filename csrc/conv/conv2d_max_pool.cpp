// A convolution that skips nothing, and max pooling of 2 x 2 pixels behind it. Some devices have
// a kernel for both. Otherwise they are two calls.
#include "conv/conv2d_max_pool.h"

#include <c10/util/accumulate.h>
#include <torch/library.h>

#include "checks.h"
#include "conv/layers.h"
#include "threshold.h"

namespace spamm {
namespace {

Tensor conv2d_max_pool_op(ConvPoolArguments& x) {
  const Tensor& input = x.input;
  TORCH_CHECK(input.dim() == 4, "input must be a batch (N, C, H, W); got shape ", input.sizes());
  x.knob = checked_knob({.threshold = 0.0});
  const Convolution conv = check_conv2d(x, /*wants_output_norms=*/false);
  const auto sizes = conv.output_sizes();
  TORCH_CHECK(sizes[2] > 1 && sizes[3] > 1,
              "the convolution's output must have at least 2 x 2 pixels; got ", sizes[2], " x ",
              sizes[3]);
  if (c10::multiply_integers(sizes) > 0) {
    const auto* backend = Backends<ConvPoolBackend>::find(input.device().type(), conv);
    if (backend != nullptr) return backend->run(conv, x.knob).contiguous(conv.output_format);
  }
  return check_and_pool(convolve(conv, x.knob).output, /*kernel_size=*/{2, 2}, /*stride=*/{2, 2},
                        /*padding=*/{0, 0}, /*dilation=*/{1, 1}, /*ceil_mode=*/false,
                        /*wants_output_norms=*/false)
      .output;
}

}  // namespace

TORCH_LIBRARY_IMPL(spamm_torch, CompositeExplicitAutograd, m) {
  m.impl("conv2d_max_pool", boxed<&conv2d_max_pool_op>());
}

}  // namespace spamm
