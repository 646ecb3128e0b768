// Conversion between contiguous and channels-last images: a transposition of (channels x pixels).
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>

#include "block.h"
#include "cpu/common/convert.h"
#include "cpu/common/machine.h"

namespace spamm::cpu {

constexpr int64_t kSquare = 16;  // edge of a square that is transposed in registers

// A row of such a square, of elements as integers.
template <class T>
using SquareRow [[gnu::vector_size(kSquare * sizeof(T))]] = UnsignedOf<T>;

// Picks elements of two rows by index. Those of `b` start at index kSquare.
template <class Row, size_t... index>
SPAMM_INLINE void pick(const Row& a, const Row& b, Row& result) {
#if defined(__clang__)
  result = __builtin_shufflevector(a, b, index...);
#else
  result = __builtin_shuffle(a, b, Row{index...});
#endif
}

// One step of a transposition: swaps upper right and lower left of squares of edge 2 * distance.
template <class T, int64_t distance, size_t... lane>
SPAMM_INLINE void swap_quarters(SquareRow<T> (&rows)[kSquare], std::index_sequence<lane...>) {
  using Row = SquareRow<T>;
  for (int64_t r = 0; r < kSquare; ++r) {
    if (r & distance) continue;
    const Row upper = rows[r], lower = rows[r + distance];
    pick<Row, (lane & distance ? lane - distance + kSquare : lane)...>(upper, lower, rows[r]);
    pick<Row, (lane & distance ? lane + kSquare : lane + distance)...>(upper, lower,
                                                                       rows[r + distance]);
  }
}

template <class T>
SPAMM_INLINE void transpose_square(SquareRow<T> (&rows)[kSquare]) {
  constexpr auto lanes = std::make_index_sequence<kSquare>();
  swap_quarters<T, 8>(rows, lanes);
  swap_quarters<T, 4>(rows, lanes);
  swap_quarters<T, 2>(rows, lanes);
  swap_quarters<T, 1>(rows, lanes);
}

// to[c * to_stride + r] = from[r * from_stride + c]. Works in squares, so that each cache line is
// read or written once: lines at a distance of a power of two evict each other.
template <class T>
SPAMM_CPU_CLONES static void transpose(const T* __restrict from, int64_t from_stride,
                                       T* __restrict to, int64_t to_stride, int64_t rows,
                                       int64_t columns) {
  if (rows < kSquare || columns < kSquare) {
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t c = 0; c < columns; ++c) to[c * to_stride + r] = from[r * from_stride + c];
    return;
  }
  SquareRow<T> square[kSquare] = {};
  for (int64_t r = 0; r < rows; r += kSquare) {
    const int64_t r0 = std::min(r, rows - kSquare);  // the last squares overlap others
    for (int64_t c = 0; c < columns; c += kSquare) {
      const int64_t c0 = std::min(c, columns - kSquare);
      const T* first = from + r0 * from_stride + c0;
      T* target = to + c0 * to_stride + r0;
      for (int64_t i = 0; i < kSquare; ++i)
        std::memcpy(&square[i], first + i * from_stride, sizeof(square[i]));
      transpose_square<T>(square);
      for (int64_t i = 0; i < kSquare; ++i)
        std::memcpy(target + i * to_stride, &square[i], sizeof(square[i]));
    }
  }
}

// Transposes each of `matrices` contiguous matrices. A task is a part of one matrix, so that it
// uses few pages of memory at a time.
template <class T>
void transpose_matrices(const T* from, T* to, int64_t matrices, int64_t rows, int64_t columns) {
  constexpr int64_t kRowsPerTask = 64;
  const int64_t parts = blocks_of(rows, kRowsPerTask);
  at::parallel_for(0, matrices * parts, 4, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t first = task % parts * kRowsPerTask;
      const int64_t matrix = task / parts * rows * columns;
      transpose(from + matrix + first * columns, columns, to + matrix + first, rows,
                std::min(kRowsPerTask, rows - first), columns);
    }
  });
}

}  // namespace spamm::cpu
