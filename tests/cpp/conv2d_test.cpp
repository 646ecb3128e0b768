// conv2d of the C++ API against at::conv2d where nothing is skipped, and within its promise where
// something is.
#include "support.h"

namespace spamm::testing {
namespace {

class Conv2d : public OnDevice {
 protected:
  // Images whose brightness falls from the middle, so that there is something to skip.
  Tensor vignetted(at::IntArrayRef shape) const {
    const Tensor window = at::exp(-at::linspace(-3, 3, shape.back(), options()).square());
    return random(shape) * window.unsqueeze(1) * window;
  }
};
SPAMM_TEST_ON_DEVICES(Conv2d);

TEST_P(Conv2d, TakesEveryOption) {
  const Tensor input = random({3, 12, 13, 11}), weight = random({10, 6, 5, 3}), bias = random({10});
  ConvOptions options = {.stride = {2, 1}, .padding = {2, 0}, .dilation = {1, 2}, .groups = 2};
  const Tensor sums = at::conv2d(input, weight, bias, {2, 1}, {2, 0}, {1, 2}, 2);
  options.residual = random(sums.sizes());
  options.activation = "silu";
  const Tensor expected = at::silu(sums + *options.residual);
  const Tensor dense = dense_conv2d(input, weight, bias, options);
  EXPECT_LE(relative_error(dense, expected), tolerance(at::kFloat));
  options.knob = kDense;
  const Tensor output = conv2d(input, weight, bias, options);
  EXPECT_EQ(output.sizes(), expected.sizes());
  EXPECT_LE(relative_error(output, expected), tolerance(at::kFloat));
}

TEST_P(Conv2d, KeepsWithinMaxErrorAndUsesIt) {
  const Tensor input = vignetted({64, 32, 16, 16});
  const Tensor weight = random({32, 32, 3, 3});
  const Tensor dense = at::conv2d(input, weight, {}, 1, 1);
  const Tensor output =
      conv2d(input, weight, std::nullopt, {.padding = {1, 1}, .knob = {.max_error = 0.01}});
  const double operands = weight.norm().item<double>() *
                          at::im2col(input, {3, 3}, {1, 1}, {1, 1}, {1, 1}).norm().item<double>();
  const double lost = (output - dense).norm().item<double>();
  EXPECT_GT(lost, 1e-5 * dense.norm().item<double>());
  EXPECT_LE(lost, 0.01 * operands);
}

}  // namespace
}  // namespace spamm::testing
