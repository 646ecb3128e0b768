// Patterns of block-sparse matrices in device memory.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace spamm::kernels {

// int32 or int64, below 2^31.
struct Indices {
  const void* data;
  bool wide;

  // The lower half of an int64 comes first.
  __device__ int operator[](int64_t i) const {
    return static_cast<const int32_t*>(data)[wide ? 2 * i : i];
  }
};

// Stored block e of row i, for e from crow[i] to crow[i + 1] - 1, is in column col[e]; ascending.
struct Pattern {
  Indices crow, col;
  int rows;

  // The first stored block of a row that is not before `column`.
  __device__ int lower_bound(int row, int64_t column) const {
    int begin = crow[row], end = crow[row + 1];
    while (begin < end) {
      const int middle = begin + (end - begin) / 2;
      if (col[middle] < column) {
        begin = middle + 1;
      } else {
        end = middle;
      }
    }
    return begin;
  }

  // The stored block of a row in `column`; -1 if there is none.
  __device__ int find(int row, int column) const {
    const int found = lower_bound(row, column);
    return found < crow[row + 1] && col[found] == column ? found : -1;
  }
};

}  // namespace spamm::kernels
