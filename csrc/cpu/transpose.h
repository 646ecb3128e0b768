// Transposed copies between rows that lie far apart.
//
// Squares of 16 x 16 go through a small buffer, so that each line of either side is touched once:
// lines at a distance of a power of two evict each other.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/clones.h"
#include "cpu/convert.h"

namespace spamm::cpu {

// to[c * to_stride + r] = convert(from[r * from_stride + c], c) for all r and c.
template <class From, class To, class Convert>
SPAMM_INLINE void transpose(const From* __restrict from, int64_t from_stride, To* __restrict to,
                            int64_t to_stride, int64_t rows, int64_t columns,
                            const Convert& convert) {
  constexpr int64_t kSquare = 16;
  To square[kSquare][kSquare];
  for (int64_t r0 = 0; r0 < rows; r0 += kSquare) {
    const int64_t height = std::min(kSquare, rows - r0);
    for (int64_t c0 = 0; c0 < columns; c0 += kSquare) {
      const int64_t width = std::min(kSquare, columns - c0);
      for (int64_t r = 0; r < height; ++r) {
        const From* row = from + (r0 + r) * from_stride + c0;
        for (int64_t c = 0; c < width; ++c) square[c][r] = convert(row[c], c0 + c);
      }
      for (int64_t c = 0; c < width; ++c)
        std::copy_n(square[c], height, to + (c0 + c) * to_stride + r0);
    }
  }
}

}  // namespace spamm::cpu
