// The CPU's conversions between float32 and the half types, over all numbers of these types,
// against those of c10.
#include "cpu/common/convert.h"

#include <ATen/Context.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <vector>

#include "support.h"

namespace spamm::cpu {
namespace {

template <class T>
void expect_conversions_of_c10() {
  std::vector<T> all;
  std::vector<float> expected, wide;
  for (uint32_t bits = 0; bits <= 0xffff; ++bits) {
    all.emplace_back(static_cast<uint16_t>(bits), T::from_bits());
    expected.push_back(static_cast<float>(all.back()));
  }
  at::globalContext().setFlushDenormal(true);  // as a program may for its own numbers
  for (const T x : all) wide.push_back(widen(x));
  at::globalContext().setFlushDenormal(false);
  for (size_t i = 0; i < all.size(); ++i) {
    ASSERT_EQ(std::isnan(wide[i]), std::isnan(expected[i])) << i;
    if (std::isnan(wide[i])) continue;
    ASSERT_EQ(std::bit_cast<uint32_t>(wide[i]), std::bit_cast<uint32_t>(expected[i])) << i;
    ASSERT_EQ(narrow<T>(wide[i]).x, all[i].x) << i;
  }
}

TEST(Convert, Float16) { expect_conversions_of_c10<c10::Half>(); }
TEST(Convert, Bfloat16) { expect_conversions_of_c10<c10::BFloat16>(); }

}  // namespace
}  // namespace spamm::cpu
