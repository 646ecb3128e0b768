// Copies of operand blocks in the layouts that the microkernel reads: contiguous rows for A, panels
// of at most 64 columns for B, in VNNI layout for matrix instructions.
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "cpu/common/convert.h"
#include "cpu/common/machine.h"
#include "cpu/common/transpose.h"

namespace spamm::cpu {

// A matrix, or a block of one; element (r, c) is at data[r * row_stride + c * column_stride].
template <class T>
struct View {
  const T* data;
  int64_t row_stride, column_stride, rows, columns;

  // The block of at most height x width elements that starts at (row, column).
  View block(int64_t row, int64_t column, int64_t height, int64_t width) const {
    return {data + row * row_stride + column * column_stride, row_stride, column_stride,
            std::min(height, rows - row), std::min(width, columns - column)};
  }
};

// Calls visit(r, c, address of the element) for all (r, c). The order reads runs of memory for rows
// and columns alike, and few cache lines at a time: lines a power of two apart evict each other.
template <class T, class Visit>
SPAMM_INLINE void each_element(const View<T>& view, const Visit& visit) {
  const int64_t rows = view.rows, columns = view.columns;
  if (view.column_stride == 1) {
    for (int64_t r = 0; r < rows; ++r) {
      const T* row = view.data + r * view.row_stride;
      for (int64_t c = 0; c < columns; ++c) visit(r, c, row + c);
    }
    return;
  }
  constexpr int64_t kRun = 16, kLines = 8;
  for (int64_t r0 = 0; r0 < rows; r0 += kRun) {
    for (int64_t c0 = 0; c0 < columns; c0 += kLines) {
      for (int64_t c = c0; c < std::min(c0 + kLines, columns); ++c) {
        const T* column = view.data + c * view.column_stride;
        for (int64_t r = r0; r < std::min(r0 + kRun, rows); ++r)
          visit(r, c, column + r * view.row_stride);
      }
    }
  }
}

// Copies a block into rows of stride `ld`. Fills each row with zeros up to `width`.
template <class T, class P>
SPAMM_CPU_CLONES static void copy_rows(const View<T>& block, P* __restrict target, int64_t ld,
                                       int64_t width) {
  if constexpr (std::is_same_v<P, T>) {
    if (block.row_stride == 1 && block.column_stride != 1) {
      transpose(block.data, block.column_stride, target, ld, block.columns, block.rows);
    } else {
      each_element(block, [&](int64_t r, int64_t c, const T* from) { target[r * ld + c] = *from; });
    }
  } else {
    each_element(block,
                 [&](int64_t r, int64_t c, const T* from) { target[r * ld + c] = widen(*from); });
  }
  for (int64_t r = 0; block.columns < width && r < block.rows; ++r)
    std::fill(target + r * ld + block.columns, target + r * ld + width, P(0));
}

// Copies a block into VNNI layout, [pair of rows][width][2]. Missing elements become zeros.
template <class P>
SPAMM_CPU_CLONES static void copy_vnni(const View<P>& block, P* __restrict target, int64_t width) {
  static_assert(sizeof(P) == 2);
  const int64_t pairs = block.rows / 2;
  const bool odd = block.rows % 2 == 1;
  if (odd || block.columns < width) std::fill_n(target, (pairs + odd) * width * 2, P(0));
  auto* words = reinterpret_cast<uint32_t*>(target);
  const int64_t next = block.row_stride;
  const View<P> firsts{block.data, 2 * next, block.column_stride, pairs, block.columns};
  each_element(firsts, [&](int64_t pair, int64_t c, const P* first) {
    words[pair * width + c] = first->x | static_cast<uint32_t>(first[next].x) << 16;
  });
  if (!odd) return;
  const View<P> last = block.block(2 * pairs, 0, 1, block.columns);
  each_element(
      last, [&](int64_t, int64_t c, const P* element) { words[pairs * width + c] = element->x; });
}

}  // namespace spamm::cpu
