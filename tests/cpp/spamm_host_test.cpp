// Products of operands in host memory or on one device, on several "devices" that are all the CPU:
// what travels, in which order and through which buffers is the same as on GPUs.
#include <ATen/Context.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "checks.h"
#include "shards/lane.h"
#include "shards/spamm_devices.h"
#include "support.h"

namespace spamm::shards {
namespace {

// New memory holds NaN, so that what is read but was not copied shows.
class SpammHost : public ::testing::Test {
 protected:
  void SetUp() override {
    at::manual_seed(0);
    at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/true);
    at::globalContext().setDeterministicFillUninitializedMemory(true);
    ASSERT_TRUE(at::empty({8}).isnan().all().item<bool>());
  }
  void TearDown() override {
    at::globalContext().setDeterministicAlgorithms(false, /*warn_only=*/false);
  }

  // Random entries that fall by e every eighth of the way from the diagonal to the far corner.
  static Tensor decaying(int64_t rows, int64_t columns, at::ScalarType dtype = at::kFloat) {
    const Tensor i = at::arange(rows, at::kDouble).unsqueeze(1) / std::max<int64_t>(1, rows);
    const Tensor j = at::arange(columns, at::kDouble).unsqueeze(0) / std::max<int64_t>(1, columns);
    return (at::randn({rows, columns}, at::kDouble) * at::exp(-8 * (i - j).abs())).to(dtype);
  }

  // Pieces of a few rows and stages of two blocks, so that all rings turn over many times.
  static HostSizes small(int64_t panels, bool is_pinned) {
    return {.stage_blocks = 2, .panels = panels, .piece_bytes = is_pinned ? 0 : 5000};
  }
};

// In the form in which the stages take them.
const std::vector<Knob>& knobs() {
  static const std::vector<Knob> all = {checked_knob(Knob{.threshold = 20}),
                                        Knob{.valid_ratio = 0.3}, Knob{.max_error = 0.05},
                                        checked_knob(Knob{.threshold = 0.0})};
  return all;
}

TEST_F(SpammHost, HasTheBitsOfOneDevice) {
  std::mt19937 random(0);
  const auto draw = [&](const auto& choices) { return choices[random() % choices.size()]; };
  const auto happens = [&](int of) { return random() % of == 0; };
  const std::vector<at::ScalarType> dtypes = {at::kHalf, at::kBFloat16, at::kFloat, at::kDouble};
  const std::vector<DimVector> blocks = {{64, 64, 64}, {32, 32, 32}, {64, 32, 128}, {128, 128, 64}};
  const std::vector<DimVector> products = {{640, 320, 1000}, {1000, 333, 777}, {256, 256, 9000},
                                           {129, 65, 1},     {1, 1, 700},      {300, 0, 200},
                                           {0, 64, 70},      {70, 64, 0}};
  const auto equal = [](const Tensor& x, const Tensor& y) {
    return at::equal(x.nan_to_num(7), y.nan_to_num(7));
  };
  int64_t skipping = 0;
  for (int run = 0; run < 240; ++run) {
    const DimVector size = draw(products), block = draw(blocks);
    const at::ScalarType dtype = draw(dtypes);
    Tensor a = decaying(size[0], size[1], dtype), b = decaying(size[1], size[2], dtype);
    if (happens(4)) a = a.t().contiguous().t();
    if (happens(4)) b = at::constant_pad_nd(b, {3, 1}, NAN).slice(1, 3, 3 + size[2]);
    if (happens(8) && size[1] > 0) b = b.narrow(0, 0, 1).expand({size[1], size[2]});
    if (happens(8) && a.numel() > 0 && b.numel() > 0) a[size[0] - 1][0] = NAN;
    if (happens(8) && a.numel() > 0 && b.is_contiguous() && b.numel() > 0) b[0][0] = INFINITY;
    ProductOptions options = {.knob = draw(knobs()), .block = block};
    if (happens(4)) options.norm_a = norm_map(a, {block[0], block[1]}).flip(0).contiguous();
    if (happens(4)) options.norm_b = norm_map(b, {block[1], block[2]}).flip(1);
    const std::vector<int64_t> panels = {1, 2, 3, 9};
    const HostSizes sizes = happens(8) ? HostSizes{} : small(draw(panels), happens(2));
    const std::vector<at::Device> devices(1 + random() % 4, at::kCPU);
    const Tensor c = spamm_from_host({options, a, b}, devices, sizes);
    const Tensor expected = mm(a.contiguous(), b.contiguous(), options);
    options.knob = testing::kDense;
    skipping += !equal(expected, mm(a.contiguous(), b.contiguous(), options));
    EXPECT_TRUE(equal(c, expected)) << "run " << run << ": " << c10::toString(dtype) << ", " << size
                                    << " on " << devices.size();
  }
  EXPECT_GT(skipping, 60);  // else little would travel less
}

// ---- Operands on one device ---------------------------------------------------------------------

Tensor from_home(const Tensor& a, const Tensor& b, const Knob& knob, int64_t devices,
                 bool is_home_used, at::IntArrayRef block = {64, 64, 64}) {
  const ProductOptions options = {.knob = knob, .block = DimVector(block)};
  return spamm_from_home({options, a, b}, std::vector<at::Device>(devices, at::kCPU), is_home_used);
}

TEST_F(SpammHost, OthersComputeAllRowsOfOneDevice) {
  for (const auto dtype : {at::kHalf, at::kFloat, at::kDouble}) {
    const Tensor a = decaying(1100, 330, dtype), b = decaying(330, 5000, dtype);
    for (const Knob& knob : knobs()) {
      const Tensor expected = mm(a, b, {.knob = knob});
      for (const int64_t devices : {1, 2, 3}) {
        EXPECT_TRUE(at::equal(from_home(a, b, knob, devices, false), expected))
            << c10::toString(dtype) << " on " << devices;
      }
    }
  }
  const Tensor a = decaying(512, 640).t(), b = decaying(512, 300);
  const std::vector<int64_t> block = {32, 64, 128};
  EXPECT_TRUE(at::equal(from_home(a, b, knobs()[1], 2, false, block),
                        mm(a.contiguous(), b, {.knob = knobs()[1], .block = DimVector(block)})));
}

TEST_F(SpammHost, OthersComputeSomeRowsOfOneDevice) {
  const Tensor a = decaying(3072, 1024, at::kDouble), b = decaying(1024, 2560, at::kDouble);
  for (const size_t knob : {1, 3}) {
    const Tensor expected = mm(a, b, {.knob = knobs()[knob]});
    EXPECT_TRUE(at::equal(from_home(a, b, knobs()[knob], 2, true), expected));
  }
}

TEST(ForEachPart, ThrowsTheFirstErrorWhenAllPartsHaveEnded) {
  std::atomic<int> ended = 0;
  const auto run = [&](int64_t part) {
    ++ended;
    if (part % 2 == 1) throw std::runtime_error(std::to_string(part));
  };
  try {
    for_each_part(4, {}, run);
    FAIL();
  } catch (const std::runtime_error& error) {
    EXPECT_STREQ(error.what(), "1");
  }
  EXPECT_EQ(ended, 4);
}

}  // namespace
}  // namespace spamm::shards
