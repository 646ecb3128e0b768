// mm, addmm, bmm and linear against at:: where nothing is skipped, against the definition where
// something is.
#include <c10/util/Exception.h>

#include <functional>
#include <limits>

#include "arguments.h"
#include "spamm.h"
#include "support.h"

namespace spamm::testing {
namespace {

constexpr at::ScalarType kDtypes[] = {at::kHalf, at::kBFloat16, at::kFloat, at::kDouble};

class Products : public OnDevice {};
SPAMM_TEST_ON_DEVICES(Products);

TEST_P(Products, MmSkipsByTheDefinitionForEveryType) {
  for (const auto dtype : kDtypes) {
    const Tensor a = decaying(200, 190, dtype), b = decaying(190, 210, dtype);
    const Tensor norm_a = norm_map(a, {32, 64}), norm_b = norm_map(b, {64, 128});
    const Tensor expected = reference_mm(a, b, norm_a, norm_b, 1e-2, {32, 64, 128});
    const Tensor c = mm(a, b, {.knob = {.threshold = 1e-2}, .block = {32, 64, 128}});
    EXPECT_EQ(c.scalar_type(), dtype);
    EXPECT_LE(relative_error(c, expected), tolerance(dtype));
    EXPECT_LT(valid_ratio(norm_a, norm_b, at::scalar_tensor(1e-2)).item<double>(), 0.95);
  }
}

TEST_P(Products, TheKnobsAgree) {
  const Tensor a = decaying(256, 256), b = decaying(256, 256);
  const Tensor norm_a = norm_map(a, {64, 64}), norm_b = norm_map(b, {64, 64});
  const Tensor by_ratio = mm(a, b, {.knob = {.valid_ratio = 0.5}});
  EXPECT_TRUE(at::equal(by_ratio, mm(a, b, {.knob = {.tau = find_tau(norm_a, norm_b, 0.5)}})));
  EXPECT_TRUE(at::equal(
      by_ratio, mm(a, b, {.knob = {.valid_ratio = 0.5}, .norm_a = norm_a, .norm_b = norm_b})));
  const Tensor by_error = mm(a, b, {.knob = {.max_error = 1e-3}});
  EXPECT_LE((by_error - at::mm(a, b)).norm().item<double>(),
            1.1e-3 * a.norm().item<double>() * b.norm().item<double>());
}

TEST_P(Products, AddmmScalesAndIgnoresItsInputForBetaZero) {
  const Tensor a = random({80, 90}), b = random({90, 50}), bias = random({50});
  const Tensor expected = at::addmm(bias, a, b, 0.5, 2);
  EXPECT_LE(
      relative_error(
          mm(a, b, {.knob = kDense, .block = {32, 64, 32}, .input = bias, .beta = 0.5, .alpha = 2}),
          expected),
      tolerance(at::kFloat));
  const Tensor nan = at::full({50}, std::numeric_limits<float>::quiet_NaN(), options());
  EXPECT_LE(relative_error(mm(a, b, {.knob = kDense, .input = nan, .beta = 0}), at::mm(a, b)),
            tolerance(at::kFloat));
}

TEST_P(Products, BmmSharesOneThreshold) {
  const Tensor a = random({3, 96, 64}) * at::tensor({1.0, 1e-3, 10.0}, options()).view({3, 1, 1});
  const Tensor b = random({3, 64, 96});
  const Tensor c = bmm(a, b, {.knob = {.valid_ratio = 2.0 / 3}, .block = {32, 32, 32}});
  EXPECT_TRUE(at::equal(c[1], at::zeros({96, 96}, options())));
  EXPECT_LE(relative_error(c[0], at::mm(a[0], b[0])), tolerance(at::kFloat));
  EXPECT_LE(relative_error(c[2], at::mm(a[2], b[2])), tolerance(at::kFloat));
}

TEST_P(Products, LinearTakesRowsOfAnyShape) {
  const Tensor input = random({2, 5, 96}), weight = random({40, 96}), bias = random({40});
  EXPECT_LE(relative_error(linear(input, weight, bias, {.knob = kDense}),
                           at::linear(input, weight, bias)),
            tolerance(at::kFloat));
  EXPECT_LE(relative_error(linear(input[0][0], weight, std::nullopt, {.knob = kDense}),
                           at::linear(input[0][0], weight)),
            tolerance(at::kFloat));
}

TEST_P(Products, NormsOfTheResultAreThoseOfNormMap) {
  const Tensor a = decaying(150, 100), b = decaying(100, 210), input = random({150, 210});
  for (const double tau : {0.0, 1e-2, 1e30}) {
    const auto [c, norms] =
        mm_with_norms(a, b, {.knob = {.threshold = tau}, .block = {32, 64, 128}});
    EXPECT_TRUE(at::equal(c, mm(a, b, {.knob = {.threshold = tau}, .block = {32, 64, 128}})));
    EXPECT_TRUE(at::equal(norms, norm_map(c, {32, 128})));
    const auto [sum, sum_norms] = mm_with_norms(a, b, {.knob = {.threshold = tau}, .input = input});
    EXPECT_TRUE(at::equal(sum, mm(a, b, {.knob = {.threshold = tau}, .input = input})));
    EXPECT_TRUE(at::equal(sum_norms, norm_map(sum, {64, 64})));
  }
}

TEST_P(Products, SymmetricProductsAreMirrored) {
  const Tensor half = decaying(200, 200), a = half + half.t();
  const Tensor whole = mm(a, a, {.knob = {.threshold = 1e-2}});
  const Tensor c = mm(a, a, {.knob = {.threshold = 1e-2}, .symmetric = true});
  EXPECT_TRUE(at::equal(c, c.t()));
  EXPECT_TRUE(at::equal(c.triu(), whole.triu()));
  EXPECT_THROW(mm(a, a, {.knob = {.threshold = 1e-2}, .block = {32, 64, 64}, .symmetric = true}),
               c10::ValueError);
}

TEST_P(Products, ResultsAreWrittenToMemoryThatIsGiven) {
  const Knob knob = Knob{.threshold = 1e-2};
  const Tensor half = decaying(200, 200), x = half + half.t();
  const Tensor out = at::empty_like(x), map = norm_map(x, {64, 64});
  mm_out(out, x, x, {.knob = knob, .norm_a = map, .norm_b = map});
  EXPECT_TRUE(at::equal(out, mm(x, x, {.knob = knob})));
  const Tensor expected =
      mm(x, x, {.knob = knob, .norm_a = map, .norm_b = map, .input = x, .beta = 2, .alpha = -1});
  mm_out(x, x, x, {.knob = knob, .input = x, .beta = 2, .alpha = -1});
  EXPECT_TRUE(at::equal(x, expected));
  EXPECT_THROW(mm_out(x.narrow(0, 0, 64), x, x, {.knob = knob}), c10::Error);
}

// The stages by themselves: norm map, threshold, counts, bound, and multiply given all of these.

class Stages : public OnDevice {};
SPAMM_TEST_ON_DEVICES(Stages);

TEST_P(Stages, NormMapKeepsBatchesAndChoosesTheNormsType) {
  for (const auto dtype : {at::kHalf, at::kBFloat16, at::kFloat, at::kDouble}) {
    const Tensor a = random({2, 3, 70, 130}, dtype);
    const Tensor norms = norm_map(a, {64, 128});
    EXPECT_EQ(norms.sizes(), at::IntArrayRef({2, 3, 2, 2}));
    EXPECT_EQ(norms.scalar_type(), dtype == at::kDouble ? at::kDouble : at::kFloat);
    EXPECT_EQ(norms.device().type(), GetParam());
    const Tensor corner = a[1][2].narrow(0, 64, 6).narrow(1, 128, 2).to(at::kDouble).norm();
    EXPECT_NEAR(norms[1][2][1][1].item<double>() / corner.item<double>(), 1, 1e-5);
  }
}

TEST_P(Stages, FindTauKeepsTheShareAskedFor) {
  const Tensor norm_a = random({9, 11}).abs(), norm_b = random({11, 7}).abs();
  const double products = 9 * 11 * 7;
  for (const double share : {0.01, 0.3, 0.77, 1.0}) {
    const Tensor tau = find_tau(norm_a, norm_b, share);
    EXPECT_EQ(tau.dim(), 0);
    EXPECT_EQ(tau.scalar_type(), at::kFloat);
    EXPECT_EQ(tau.device().type(), GetParam());
    EXPECT_NEAR(valid_ratio(norm_a, norm_b, tau).item<double>(), share, 1 / products);
  }
}

TEST_P(Stages, RowCutsShareOutTheWork) {
  // Rows of 64: the first 256 have all of their products valid, the others none.
  const Tensor norm_a = at::cat({at::ones({4, 3}, options()), at::zeros({7, 3}, options())});
  const Tensor norm_b = at::ones({3, 5}, options());
  const Tensor tau = at::scalar_tensor(0.5, at::kDouble);
  EXPECT_EQ(row_cuts(norm_a, norm_b, tau, 2), (std::vector<int64_t>{0, 128, 704}));
  EXPECT_EQ(row_cuts(norm_a, norm_b, tau, 2, {32, 64, 64}), (std::vector<int64_t>{0, 128, 352}));
  EXPECT_EQ(row_cuts(norm_a, norm_b, tau, 1), (std::vector<int64_t>{0, 704}));
}

TEST_P(Stages, ValidCountsCountsProductsNotBelowTau) {
  Tensor norm_a = random({6, 5}).abs(), norm_b = random({5, 8}).abs();
  norm_a[2][3].fill_(std::numeric_limits<float>::quiet_NaN());
  const Tensor tau = at::scalar_tensor(0.5, options());
  const Tensor counts = valid_counts(norm_a, norm_b, tau);
  const Tensor skipped = norm_a.unsqueeze(2).mul(norm_b.unsqueeze(0)).lt(tau);
  EXPECT_EQ(counts.scalar_type(), at::kInt);
  EXPECT_TRUE(at::equal(counts, skipped.logical_not().sum(1).to(at::kInt)));
  const Tensor share = valid_ratio(norm_a, norm_b, tau);
  EXPECT_NEAR(share.item<double>(), counts.sum().item<double>() / (6 * 5 * 8), 1e-6);
}

TEST_P(Stages, ErrorBoundHoldsAndVanishesWithoutSkipping) {
  const Tensor a = decaying(200, 168, at::kDouble), b = decaying(168, 264, at::kDouble);
  const Tensor norm_a = norm_map(a, {32, 32}), norm_b = norm_map(b, {32, 32});
  EXPECT_EQ(error_bound(norm_a, norm_b, at::scalar_tensor(0.0)).item<double>(), 0);
  const Tensor tau = find_tau(norm_a, norm_b, 0.2);
  const Tensor lost = mm(a, b, {.knob = {.tau = tau}, .block = {32, 32, 32}}) - a.mm(b);
  const double bound = error_bound(norm_a, norm_b, tau).item<double>();
  EXPECT_GT(bound, 0);
  EXPECT_GE(bound, lost.norm().item<double>());
}

TEST_P(Stages, FindTauForErrorUsesTheErrorItMay) {
  const Tensor norm_a = norm_map(decaying(320, 320), {32, 32});
  const Tensor norm_b = norm_map(decaying(320, 320), {32, 32});
  const double limit = 1e-3 * norm_a.norm().item<double>() * norm_b.norm().item<double>();
  const Tensor tau = find_tau_for_error(norm_a, norm_b, 1e-3);
  EXPECT_LE(error_bound(norm_a, norm_b, tau).item<double>(), limit * (1 + 1e-6));
  EXPECT_GT(error_bound(norm_a, norm_b, tau * 1.5).item<double>(), limit);
}

TEST_P(Stages, MultiplyBelievesTheMapsItIsGiven) {
  const Tensor a = at::ones({64, 64}, options()), b = at::ones({64, 64}, options());
  const Tensor norm_a = at::tensor({1.0, 0.0, 0.0, 1.0}, at::kFloat).view({2, 2}).to(options());
  const Tensor norm_b = at::ones({2, 2}, options());
  const Tensor input = at::full({64}, 3, options());
  const Tensor c = multiply(a, b, norm_a, norm_b, at::scalar_tensor(0.5), {32, 32, 32},
                            {.input = input, .beta = 2, .alpha = 0.5});
  EXPECT_TRUE(at::equal(c, at::full({64, 64}, 2 * 3 + 0.5 * 32, options())));
}

TEST_P(Stages, BackendIsNamedForEveryType) {
  for (const auto dtype : {at::kHalf, at::kBFloat16, at::kFloat, at::kDouble}) {
    EXPECT_FALSE(backend_for(at::Device(GetParam()), dtype, {64, 64, 64}).empty());
  }
}

}  // namespace

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

TEST(ProductsOnDevices, RefuseNoDevices) {
  const Tensor a = at::ones({64, 64});
  EXPECT_THROW(mm(a, a, {.knob = {.threshold = 0.5}, .devices = DimVector()}), c10::ValueError);
}

// ---- Bad input: the type of the error, and one line that says what was expected and what came ---

namespace {

// The message of the error that a call raises; a failure where that is not an `Error`.
template <class Error>
std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const c10::Error& error) {
    EXPECT_NE(dynamic_cast<const Error*>(&error), nullptr) << error.what_without_backtrace();
    return error.what_without_backtrace();
  }
  ADD_FAILURE() << "no error";
  return "";
}

void expect_line(const std::string& message, const std::vector<std::string>& parts) {
  EXPECT_EQ(message.find('\n'), std::string::npos) << message;
  for (const auto& part : parts) EXPECT_NE(message.find(part), std::string::npos) << message;
}

class Errors : public ::testing::Test {
 protected:
  Tensor a = at::ones({64, 64}), b = at::ones({64, 64});
  Knob knob = Knob{.threshold = 0.5};
};

TEST_F(Errors, ExactlyOneKnob) {
  expect_line(error_of<c10::ValueError>([&] { mm(a, b, {.knob = Knob{}}); }),
              {"exactly one", "got none"});
  Knob two = Knob{.valid_ratio = 0.5};
  two.max_error = 0.1;
  expect_line(error_of<c10::ValueError>([&] { mm(a, b, {.knob = two}); }),
              {"exactly one", "got valid_ratio and max_error"});
}

TEST_F(Errors, ATauIsATensorOrANumber) {
  Knob two = Knob{.tau = at::ones({})};
  two.threshold = 1;
  expect_line(error_of<c10::ValueError>([&] { mm(a, b, {.knob = two}); }),
              {"exactly one", "got tau and threshold"});
}

TEST_F(Errors, DtypesAndShapes) {
  expect_line(error_of<c10::TypeError>([&] { mm(a, b.to(at::kDouble), {.knob = knob}); }),
              {"one dtype", "float32", "float64"});
  expect_line(error_of<c10::Error>([&] { bmm(a, b, {.knob = knob}); }), {"3-d", "[64, 64]"});
  expect_line(
      error_of<c10::Error>([&] { linear(a, b.narrow(1, 0, 9), std::nullopt, {.knob = knob}); }),
      {"in_features", "[64, 9]"});
}

TEST_F(Errors, Shards) {
  const Tensor images = at::ones({100, 4, 5, 5}), weight = at::ones({8, 4, 3, 3});
  const auto with = [&](const std::vector<Tensor>& shards) {
    return error_of<c10::ValueError>([&] { conv2d_shards(shards, weight, {}, {.knob = knob}); });
  };
  expect_line(with({}), {"input_shards", "got none"});
  expect_line(with({images.narrow(0, 0, 50), images.narrow(0, 50, 50)}),
              {"whole pixel blocks", "multiple of 64", "got 50"});
}

TEST_F(Errors, DevicesAreDistinct) {
  const Tensor images = at::ones({100, 4, 5, 5}), weight = at::ones({8, 4, 3, 3});
  const auto with = [&](IntArrayRef devices) {
    return error_of<c10::ValueError>([&] {
      spamm::conv2d(images, weight, std::nullopt, {.knob = knob, .devices = DimVector(devices)});
    });
  };
  expect_line(with({}), {"devices", "got none"});
  expect_line(with({1, 1}), {"devices", "distinct", "got [1, 1]"});
}

}  // namespace

}  // namespace spamm::testing
