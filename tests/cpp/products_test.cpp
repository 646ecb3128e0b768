// The calls of the C++ API: against at:: where nothing is skipped, against each other or within
// their promise where something is. Python's tests hold ops to the definition.
#include <c10/util/Exception.h>

#include <limits>
#include <utility>

#include "arguments.h"
#include "spamm.h"
#include "support.h"

namespace spamm::testing {
namespace {

class Products : public OnDevice {};
SPAMM_TEST_ON_DEVICES(Products);

TEST_P(Products, TheKnobsAndTheStagesAgree) {
  const DimVector block = {32, 64, 128};
  const Tensor a = decaying(200, 190), b = decaying(190, 210), row = random({210});
  const Tensor norm_a = norm_map(a, {32, 64}), norm_b = norm_map(b, {64, 128});
  const Tensor tau = find_tau(norm_a, norm_b, 0.5);
  const Tensor c = mm(a, b, {.knob = {.valid_ratio = 0.5}, .block = block});
  EXPECT_FALSE(at::equal(c, mm(a, b, {.knob = kDense, .block = block})));
  EXPECT_TRUE(at::equal(c, mm(a, b, {.knob = {.tau = tau}, .block = block})));
  const ProductOptions given = {.knob = {.threshold = tau.item<double>()},
                                .block = block,
                                .norm_a = norm_a,
                                .norm_b = norm_b};
  EXPECT_TRUE(at::equal(c, mm(a, b, given)));
  EXPECT_TRUE(at::equal(c, multiply(a, b, norm_a, norm_b, tau, block)));
  const Tensor sums =
      multiply(a, b, norm_a, norm_b, tau, block, {.input = row, .beta = 2, .alpha = 0.5});
  EXPECT_TRUE(at::equal(
      sums,
      mm(a, b, {.knob = {.tau = tau}, .block = block, .input = row, .beta = 2, .alpha = 0.5})));
  const Tensor by_error = find_tau_for_error(norm_a, norm_b, 1e-3);
  EXPECT_TRUE(at::equal(mm(a, b, {.knob = {.tau = by_error}, .block = block}),
                        mm(a, b, {.knob = {.max_error = 1e-3}, .block = block})));
  const Tensor counts = valid_counts(norm_a, norm_b, tau);
  const double products = 7.0 * 3 * 2, valid = counts.sum().item<double>();
  EXPECT_NEAR(valid_ratio(norm_a, norm_b, tau).item<double>(), valid / products, 1e-6);
  EXPECT_NEAR(valid, products / 2, 1);
  const double limit = 1e-3 * norm_a.norm().item<double>() * norm_b.norm().item<double>();
  EXPECT_LE(error_bound(norm_a, norm_b, by_error).item<double>(), limit * (1 + 1e-6));
  EXPECT_GT(error_bound(norm_a, norm_b, tau).item<double>(), 0);
  EXPECT_FALSE(backend_for(at::Device(GetParam()), at::kHalf, block).empty());
}

TEST_P(Products, AddmmScalesAndIgnoresItsInputForBetaZero) {
  const Tensor a = random({80, 90}), b = random({90, 50}), bias = random({50});
  const Tensor expected = at::addmm(bias, a, b, 0.5, 2);
  const Tensor sums =
      mm(a, b, {.knob = kDense, .block = {32, 64, 32}, .input = bias, .beta = 0.5, .alpha = 2});
  EXPECT_LE(relative_error(sums, expected), tolerance(at::kFloat));
  const Tensor nan = at::full({50}, std::numeric_limits<float>::quiet_NaN(), options());
  EXPECT_LE(relative_error(mm(a, b, {.knob = kDense, .input = nan, .beta = 0}), at::mm(a, b)),
            tolerance(at::kFloat));
}

TEST_P(Products, BmmSharesOneThresholdAndLinearTakesRowsOfAnyShape) {
  const Tensor a = random({3, 96, 64}) * at::tensor({1.0, 1e-3, 10.0}, options()).view({3, 1, 1});
  const Tensor b = random({3, 64, 96});
  const Tensor c = bmm(a, b, {.knob = {.valid_ratio = 2.0 / 3}, .block = {32, 32, 32}});
  EXPECT_TRUE(at::equal(c[1], at::zeros({96, 96}, options())));
  EXPECT_LE(relative_error(c[0], at::mm(a[0], b[0])), tolerance(at::kFloat));
  EXPECT_LE(relative_error(c[2], at::mm(a[2], b[2])), tolerance(at::kFloat));
  const Tensor input = random({2, 5, 96}), weight = random({40, 96}), bias = random({40});
  const std::pair<Tensor, OptTensor> cases[] = {{input, bias}, {input[0][0], std::nullopt}};
  for (const auto& [x, added] : cases) {
    EXPECT_LE(
        relative_error(linear(x, weight, added, {.knob = kDense}), at::linear(x, weight, added)),
        tolerance(at::kFloat));
  }
}

TEST_P(Products, SymmetricProductsWithNormsIntoMemoryThatIsGiven) {
  const Knob knob = Knob{.threshold = 1e-2};
  const Tensor half = decaying(200, 200), x = half + half.t();
  const Tensor whole = mm(x, x, {.knob = knob}), map = norm_map(x, {64, 64});
  const auto [c, norms] = mm_with_norms(x, x, {.knob = knob, .symmetric = true});
  EXPECT_TRUE(at::equal(c, c.t()));
  EXPECT_TRUE(at::equal(c.triu(), whole.triu()));
  EXPECT_TRUE(at::equal(norms, norm_map(c, {64, 64})));
  const Tensor out = at::empty_like(x);
  mm_out(out, x, x, {.knob = knob, .norm_a = map, .norm_b = map});
  EXPECT_TRUE(at::equal(out, whole));
  const Tensor expected = mm(x, x, {.knob = knob, .input = x, .beta = 2, .alpha = -1});
  mm_out(x, x, x, {.knob = knob, .input = x, .beta = 2, .alpha = -1});
  EXPECT_TRUE(at::equal(x, expected));
  EXPECT_THROW(mm_out(x.narrow(0, 0, 64), x, x, {.knob = knob}), c10::Error);
}

class Conv2d : public OnDevice {};
SPAMM_TEST_ON_DEVICES(Conv2d);

TEST_P(Conv2d, TakesEveryOption) {
  const Tensor input = random({3, 12, 13, 11}), weight = random({10, 6, 5, 3}), bias = random({10});
  ConvOptions options = {.stride = {2, 1}, .padding = {2, 0}, .dilation = {1, 2}, .groups = 2};
  const Tensor sums = at::conv2d(input, weight, bias, {2, 1}, {2, 0}, {1, 2}, 2);
  options.residual = random(sums.sizes());
  options.activation = "leaky_relu";
  options.slope.tensor = random({10});
  const Tensor expected = at::prelu(sums + *options.residual, *options.slope.tensor);
  const Tensor dense = dense_conv2d(input, weight, bias, options);
  EXPECT_LE(relative_error(dense, expected), tolerance(at::kFloat));
  options.knob = kDense;
  const Tensor output = conv2d(input, weight, bias, options);
  EXPECT_EQ(output.sizes(), expected.sizes());
  EXPECT_LE(relative_error(output, expected), tolerance(at::kFloat));
  options.knob = Knob{.threshold = std::numeric_limits<double>::infinity()};  // skips everything
  const Tensor rest = at::prelu(bias.view({10, 1, 1}) + *options.residual, *options.slope.tensor);
  EXPECT_LE(relative_error(conv2d(input, weight, bias, options), rest), tolerance(at::kFloat));
}

TEST_P(Products, RowCutsShareOutTheWork) {
  // Rows of 64: the first 256 have all of their products valid, the others none.
  const Tensor norm_a = at::cat({at::ones({4, 3}, options()), at::zeros({7, 3}, options())});
  const Tensor norm_b = at::ones({3, 5}, options());
  const Tensor tau = at::scalar_tensor(0.5, at::kDouble);
  EXPECT_EQ(row_cuts(norm_a, norm_b, tau, 2), (std::vector<int64_t>{0, 128, 704}));
  EXPECT_EQ(row_cuts(norm_a, norm_b, tau, 2, {32, 64, 64}), (std::vector<int64_t>{0, 128, 352}));
  EXPECT_EQ(row_cuts(norm_a, norm_b, tau, 1), (std::vector<int64_t>{0, 704}));
}

TEST_P(Products, ShardsHaveTheBitsOfTheWhole) {
  const Tensor a = decaying(300, 256), b = decaying(256, 310);
  for (const Knob& knob : {Knob{.threshold = 0.5}, Knob{.valid_ratio = 0.3}}) {
    const Tensor whole = mm(a, b, {.knob = knob});
    const std::vector<Tensor> rows = {a.slice(0, 0, 128), a.slice(0, 128)};
    const std::vector<Tensor> depths = {b.slice(0, 0, 64), b.slice(0, 64)};
    EXPECT_TRUE(at::equal(at::cat(mm_shards(rows, depths, {.knob = knob})), whole));
    EXPECT_TRUE(at::equal(at::cat(mm_shards(rows, {b, b}, {.knob = knob})), whole));
  }
}

TEST(MirrorUpper, CopiesTheUpperTriangleOfEachMatrix) {
  for (const int64_t size : {0, 1, 2, 511, 512, 513, 1300}) {
    Tensor c = at::randn({2, size, size});
    const Tensor upper = c.triu();
    mirror_upper(c);
    EXPECT_TRUE(at::equal(c, upper + c.triu(1).mT())) << size;
    EXPECT_TRUE(at::equal(c.triu(), upper)) << size;
  }
}

TEST(Errors, AreOfTheirKindAndOneLine) {
  const Tensor a = at::ones({64, 64});
  const Knob one = Knob{.threshold = 0.5};
  Knob two = Knob{.valid_ratio = 0.5}, taus = Knob{.tau = at::ones({})};
  two.max_error = 0.1, taus.threshold = 1;
  const std::pair<ProductOptions, std::string> cases[] = {
      {{.knob = Knob{}}, "got none"},
      {{.knob = two}, "got valid_ratio and max_error"},
      {{.knob = taus}, "got tau and threshold"},
      {{.knob = one, .devices = DimVector()}, "got none"},
      {{.knob = one, .devices = DimVector({1, 1})}, "devices must be distinct; got [1, 1]"}};
  for (const auto& [options, words] : cases) {
    try {
      mm(a, a, options);
      ADD_FAILURE() << words;
    } catch (const c10::ValueError& error) {
      const std::string line = error.what_without_backtrace();
      EXPECT_TRUE(line.ends_with(words) && line.find('\n') == std::string::npos) << line;
    }
  }
}

}  // namespace
}  // namespace spamm::testing
