// Limits the number of kernels that brgemm generates.
//
// brgemm generates a kernel for each combination of sizes and strides and keeps it for the life of
// the thread. A program whose sizes change from call to call would fill its memory with kernels.
// Therefore only the first shapes in a process are multiplied without a copy. All others are copied
// and padded, so that few sizes and strides occur.
#pragma once

#include <c10/util/hash.h>

#include <array>
#include <atomic>
#include <bit>
#include <cstdint>

namespace spamm::cpu {

constexpr int64_t kDepthStep = 32;  // padded sizes of K and of rows are multiples of these
constexpr int64_t kRowsStep = 16;

inline int64_t round_up(int64_t size, int64_t step) { return (size + step - 1) / step * step; }

// Small numbers are rounded to a power of two: a product of one row should not cost sixteen.
inline int64_t rounded_rows(int64_t rows) {
  return rows < kRowsStep ? static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(rows)))
                          : round_up(rows, kRowsStep);
}

// Whether the shape described by `values` is among the first in this process. The answer for a
// shape never changes. Two shapes with the same hash count as one; at worst brgemm then generates
// one more kernel.
template <class... Values>
bool is_early_shape(const Values&... values) {
  constexpr int kMost = 32;
  static std::array<std::atomic<size_t>, kMost> met{};
  const size_t shape = c10::get_hash(values...) | 1;  // never zero, which marks a free place
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
