// Which shapes the microkernel may be generated for.
//
// brgemm keeps every kernel it generates, one for each combination of sizes and strides, for the
// life of the thread. Programs whose sizes change from call to call would fill memory with them. So
// only the first shapes that a process meets are multiplied as they are. All others are copied into
// rows of few strides and rounded up to few sizes.
#pragma once

#include <c10/util/hash.h>

#include <array>
#include <atomic>
#include <bit>
#include <cstdint>

namespace spamm::cpu {

constexpr int64_t kDepthStep = 32;  // of K, where sizes are rounded up
constexpr int64_t kRowsStep = 16;

inline int64_t round_up(int64_t size, int64_t step) { return (size + step - 1) / step * step; }

// Few rows stay few: a product of one row should not cost sixteen.
inline int64_t rounded_rows(int64_t rows) {
  return rows < kRowsStep ? static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(rows)))
                          : round_up(rows, kRowsStep);
}

// Whether the shape described by `values` is among the first that this process has met. The answer
// for a shape never changes. Shapes of equal hash count as one, which costs a kernel at most.
template <class... Values>
bool is_early_shape(const Values&... values) {
  constexpr int kMost = 32;
  static std::array<std::atomic<size_t>, kMost> met{};
  const size_t shape = c10::get_hash(values...) | 1;  // zero marks a free place
  for (auto& place : met) {
    size_t known = place.load(std::memory_order_relaxed);
    if (known == 0 && place.compare_exchange_strong(known, shape, std::memory_order_relaxed)) {
      return true;
    }
    if (known == shape) return true;
  }
  return false;
}

}  // namespace spamm::cpu
