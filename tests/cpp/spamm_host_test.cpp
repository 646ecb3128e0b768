// Products of operands in host memory or on one device, on several "devices" that are all the CPU:
// what travels, in which order and through which buffers is the same as on GPUs.
#include <ATen/Context.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <optional>
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

  struct Maps {
    std::optional<Tensor> norm_a, norm_b;
  };

  static Tensor from_host(const Tensor& a, const Tensor& b, const Knob& knob, int64_t devices,
                          const HostSizes& sizes, at::IntArrayRef block = {64, 64, 64},
                          const Maps& maps = {}) {
    const ProductOptions options = {
        .knob = knob, .block = DimVector(block), .norm_a = maps.norm_a, .norm_b = maps.norm_b};
    return spamm_from_host({options, a, b}, std::vector<at::Device>(devices, at::kCPU), sizes);
  }

  // Pieces of a few rows and stages of two blocks, so that all rings turn over many times.
  static HostSizes small(int64_t panels = 1, bool is_pinned = false) {
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
  for (const auto dtype : {at::kHalf, at::kBFloat16, at::kFloat, at::kDouble}) {
    const Tensor a = decaying(640, 320, dtype), b = decaying(320, 1000, dtype);
    const Tensor ratio = valid_ratio(norm_map(a, {64, 64}), norm_map(b, {64, 64}), *knobs()[0].tau);
    EXPECT_NEAR(ratio.item<double>(), 0.5, 0.4);  // some are skipped
    for (const Knob& knob : knobs()) {
      const Tensor expected = mm(a, b, {.knob = knob});
      for (const int64_t devices : {1, 2, 3}) {
        for (const bool is_pinned : {false, true}) {
          EXPECT_TRUE(at::equal(from_host(a, b, knob, devices, small(1, is_pinned)), expected))
              << c10::toString(dtype) << " on " << devices << (is_pinned ? ", pinned" : "");
        }
      }
    }
  }
}

TEST_F(SpammHost, AnyPanelsSizesAndBlocks) {
  for (const std::vector<int64_t>& block :
       {std::vector<int64_t>{32, 32, 32}, {64, 32, 128}, {128, 128, 64}}) {
    for (const std::vector<int64_t>& size :
         {std::vector<int64_t>{1000, 333, 777}, {129, 65, 1}, {1, 1, 700}, {300, 0, 200}}) {
      const Tensor a = decaying(size[0], size[1]), b = decaying(size[1], size[2]);
      const Tensor expected = mm(a, b, {.knob = {.valid_ratio = 0.4}, .block = DimVector(block)});
      for (const int64_t panels : {1, 2, 3, 9}) {
        for (const int64_t devices : {1, 2, 4}) {
          const Tensor c = from_host(a, b, Knob{.valid_ratio = 0.4}, devices, small(panels), block);
          EXPECT_TRUE(at::equal(c, expected))
              << at::IntArrayRef(size) << ", " << panels << " panels on " << devices << " devices";
        }
      }
    }
  }
}

TEST_F(SpammHost, AnyStridesAndSizesOfItsOwn) {
  const Tensor a = decaying(256, 512).t(), b = decaying(512, 9003).slice(1, 3).slice(0, 0, 256);
  const Tensor row = at::randn({1, 500}).expand({256, 500});
  for (const Tensor& x : {b, row}) {
    for (const size_t knob : {0, 1}) {
      const Tensor expected = mm(a.contiguous(), x.contiguous(), {.knob = knobs()[knob]});
      for (const HostSizes& sizes : {HostSizes{}, small()}) {
        EXPECT_TRUE(at::equal(from_host(a, x, knobs()[knob], 2, sizes), expected));
      }
    }
  }
  const Tensor none = from_host(at::empty({0, 64}), at::ones({64, 70}), knobs()[0], 2, {});
  EXPECT_EQ(none.sizes(), at::IntArrayRef({0, 70}));
  const Tensor narrow = from_host(at::ones({70, 64}), at::empty({64, 0}), knobs()[1], 2, {});
  EXPECT_EQ(narrow.sizes(), at::IntArrayRef({70, 0}));
}

TEST_F(SpammHost, BelievesTheMapsItIsGiven) {
  const Tensor a = decaying(384, 256), b = decaying(256, 600);
  const Maps maps = {norm_map(a, {64, 64}).flip(0).contiguous(), norm_map(b, {64, 64}).flip(1)};
  for (const Knob& knob : knobs()) {
    const Tensor tau = knob.tau ? *knob.tau
                       : knob.valid_ratio
                           ? find_tau(*maps.norm_a, *maps.norm_b, *knob.valid_ratio)
                           : find_tau_for_error(*maps.norm_a, *maps.norm_b, *knob.max_error);
    const Tensor expected = multiply(a, b, *maps.norm_a, *maps.norm_b, tau, {64, 64, 64});
    EXPECT_TRUE(at::equal(from_host(a, b, knob, 2, small(2), {64, 64, 64}, maps), expected));
  }
}

TEST_F(SpammHost, BadValuesAreNeverSkipped) {
  Tensor a = decaying(256, 256), b = decaying(256, 600);
  a[200][7] = NAN, b[77][500] = INFINITY;
  const Tensor expected = mm(a, b, {.knob = {.threshold = 1e30}});
  ASSERT_TRUE(expected.isnan().any().item<bool>());
  const Tensor c = from_host(a, b, checked_knob(Knob{.threshold = 1e30}), 2, small());
  EXPECT_TRUE(at::equal(c.nan_to_num(7), expected.nan_to_num(7)));
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
