// The stages by themselves: norm map, threshold, counts, bound, and multiply given all of these.
#include <limits>

#include "support.h"

namespace spamm::testing {
namespace {

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
}  // namespace spamm::testing
