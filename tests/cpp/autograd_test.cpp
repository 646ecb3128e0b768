// Gradients through LibTorch's autograd: those of the operation without skipping.
#include "support.h"

namespace spamm::testing {
namespace {

class Autograd : public OnDevice {
 protected:
  static Tensor leaf(const Tensor& t) { return t.detach().clone().requires_grad_(); }
};
SPAMM_TEST_ON_DEVICES(Autograd);

TEST_P(Autograd, MmHasTheDenseGradient) {
  const Tensor a = leaf(decaying(96, 80, at::kDouble)), b = leaf(decaying(80, 64, at::kDouble));
  const Tensor grad = random({96, 64}, at::kDouble);
  mm(a, b, {.knob = {.valid_ratio = 0.3}, .block = {32, 32, 32}}).backward(grad);
  EXPECT_LE(relative_error(a.grad(), grad.mm(b.t())), tolerance(at::kDouble));
  EXPECT_LE(relative_error(b.grad(), a.t().mm(grad)), tolerance(at::kDouble));
}

TEST_P(Autograd, Conv2dHasTheDenseGradient) {
  const Tensor input = leaf(random({2, 8, 7, 7}, at::kDouble)),
               bias = leaf(random({24}, at::kDouble));
  const Tensor weight = leaf(random({24, 8, 3, 3}, at::kDouble));
  const Tensor grad = random({2, 24, 4, 4}, at::kDouble);
  conv2d(input, weight, bias, {.stride = {2, 2}, .padding = {1, 1}, .knob = {.valid_ratio = 0.5}})
      .backward(grad);
  const Tensor dense_input = leaf(input), dense_weight = leaf(weight), dense_bias = leaf(bias);
  at::conv2d(dense_input, dense_weight, dense_bias, 2, 1).backward(grad);
  EXPECT_LE(relative_error(input.grad(), dense_input.grad()), tolerance(at::kDouble));
  EXPECT_LE(relative_error(weight.grad(), dense_weight.grad()), tolerance(at::kDouble));
  EXPECT_LE(relative_error(bias.grad(), dense_bias.grad()), tolerance(at::kDouble));
}

TEST_P(Autograd, AResidualHasTheGradientBeforeTheActivation) {
  const Tensor input = random({2, 8, 7, 7}, at::kDouble),
               weight = random({24, 8, 3, 3}, at::kDouble);
  const Tensor residual = leaf(random({2, 24, 5, 5}, at::kDouble));
  const Tensor grad = random({2, 24, 5, 5}, at::kDouble);
  for (const char* activation : {"relu", "silu"}) {
    const Tensor ours = leaf(residual), dense = leaf(residual), expected = leaf(residual);
    conv2d(input, weight, std::nullopt,
           {.knob = kDense, .residual = ours, .activation = activation})
        .backward(grad);
    dense_conv2d(input, weight, std::nullopt, {.residual = dense, .activation = activation})
        .backward(grad);
    const Tensor sums = at::conv2d(input, weight) + expected;
    (activation == std::string("relu") ? at::relu(sums) : at::silu(sums)).backward(grad);
    EXPECT_LE(relative_error(ours.grad(), expected.grad()), tolerance(at::kDouble)) << activation;
    EXPECT_LE(relative_error(dense.grad(), expected.grad()), tolerance(at::kDouble)) << activation;
  }
}

}  // namespace
}  // namespace spamm::testing
