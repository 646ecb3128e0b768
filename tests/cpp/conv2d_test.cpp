// conv2d against at::conv2d where nothing is skipped, and within its promise where something is.
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

struct Geometry {
  DimVector kernel, stride, padding, dilation;
  int64_t groups;
};

TEST_P(Conv2d, WithTauZeroIsTheDenseConvolution) {
  const Geometry geometries[] = {
      {{3, 3}, {1, 1}, {1, 1}, {1, 1}, 1}, {{1, 1}, {1, 1}, {0, 0}, {1, 1}, 1},
      {{5, 3}, {2, 1}, {2, 0}, {1, 1}, 1}, {{3, 3}, {1, 2}, {2, 2}, {2, 2}, 1},
      {{3, 3}, {1, 1}, {1, 1}, {1, 1}, 2},
  };
  for (const auto& [kernel, stride, padding, dilation, groups] : geometries) {
    const Tensor input = random({3, 12, 13, 11});
    const Tensor weight = random({10, 12 / groups, kernel[0], kernel[1]}), bias = random({10});
    const Tensor expected = at::conv2d(input, weight, bias, stride, padding, dilation, groups);
    const Tensor output = conv2d(input, weight, bias,
                                 {.stride = stride,
                                  .padding = padding,
                                  .dilation = dilation,
                                  .groups = groups,
                                  .knob = kDense});
    EXPECT_EQ(output.sizes(), expected.sizes());
    EXPECT_LE(relative_error(output, expected), tolerance(at::kFloat));
  }
}

TEST_P(Conv2d, AddsTheResidualAndAppliesTheActivation) {
  const Tensor input = random({3, 8, 7, 7}), weight = random({16, 8, 3, 3}), bias = random({16});
  const Tensor residual = random({3, 16, 5, 5});
  const Tensor sums = at::conv2d(input, weight, bias) + residual;
  const std::pair<const char*, Tensor> results[] = {
      {"none", sums},
      {"relu", at::relu(sums)},
      {"relu6", at::relu6(sums)},
      {"hardswish", at::hardswish(sums)},
      {"silu", at::silu(sums)},
      {"leaky_relu", at::leaky_relu(sums)},
  };
  for (const auto& [activation, expected] : results) {
    const Tensor output = conv2d(input, weight, bias,
                                 {.knob = kDense, .residual = residual, .activation = activation});
    EXPECT_LE(relative_error(output, expected), tolerance(at::kFloat)) << activation;
    const Tensor dense =
        dense_conv2d(input, weight, bias, {.residual = residual, .activation = activation});
    EXPECT_LE(relative_error(dense, expected), tolerance(at::kFloat)) << activation;
  }
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

TEST_P(Conv2d, ShardsHaveTheBitsOfTheWhole) {
  const Tensor input = vignetted({100, 32, 16, 16}), weight = random({32, 32, 3, 3});
  const Tensor bias = random({32});
  const std::vector<Tensor> shards = {input.narrow(0, 0, 64), input.narrow(0, 64, 36)};
  const Tensor dense = conv2d(input, weight, bias, {.padding = {1, 1}, .knob = kDense});
  for (const Knob& knob :
       {Knob{.threshold = 300.0}, Knob{.valid_ratio = 0.5}, Knob{.max_error = 0.01}}) {
    const Tensor whole = conv2d(input, weight, bias, {.padding = {1, 1}, .knob = knob});
    EXPECT_FALSE(at::equal(whole, dense));
    const auto outputs = conv2d_shards(shards, weight, bias, {.padding = {1, 1}, .knob = knob});
    EXPECT_TRUE(at::equal(at::cat(outputs), whole));
    const auto with_copies = conv2d_shards(shards, {weight, weight.clone()}, {bias, bias.clone()},
                                           {.padding = {1, 1}, .knob = knob});
    EXPECT_TRUE(at::equal(at::cat(with_copies), whole));
  }
}

}  // namespace
}  // namespace spamm::testing
