// The parameters of the multiply kernels: raw pointers, sizes and strides (in elements).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/common/parameters.h"

namespace spamm::kernels {

// One operand. It is contiguous along K (k_major) or along its other dimension, M or N; `leading`
// is the stride of the dimension that is not contiguous. Address, leading and batch stride are
// multiples of 16 bytes, or `by_entry`: the portable kernels then copy entries one by one, and
// Hopper's small tiles of float64 read even and odd lines apart.
struct Operand {
  const void* data;
  int64_t batch_stride, leading;
  bool k_major;
  bool by_entry = false;
};

// C = alpha * (A B over valid blocks) + beta * input.
template <class Norm>
struct MultiplyParams {
  Operand a, b;
  // Rows [first_own_row, first_own_row + own_rows) of B, if there are any, are read from own_b,
  // which has b's order. Only Hopper's kernels of half types and float64 can. The rows start at a
  // multiple of 64 and end at one or at K. There is no batch.
  Operand own_b;
  int64_t first_own_row, own_rows;
  const Norm* norm_a;  // (batch, ceil(M / block_m), ceil(K / block_k)), contiguous
  const Norm* norm_b;  // (batch, ceil(K / block_k), ceil(N / block_n)), contiguous
  Tau<Norm> tau;
  int64_t batch, m, n, k;
  int log2_block_m, log2_block_k, log2_block_n;
  Norm alpha, beta;
  const void* input;         // of C's type; null if there is none or beta is 0
  int64_t input_strides[3];  // batch, row, column; 0 along a broadcast dimension
  void* c;  // (batch, M, N), rows contiguous; its address is a multiple of 16 bytes
  int64_t c_batch_stride, c_leading;  // c_leading: the stride of a row

  // Counts the tiles that thread blocks have claimed, in device memory. No other product may use
  // the counter until this one has ended. The launch sets it to zero unless next_tile_is_zero.
  int* next_tile;
  bool next_tile_is_zero;  // it is zero once the previous kernel of the stream has ended

  // Only what lies on and above the diagonal is asked for. A kernel may leave the rest as it was,
  // or write what it likes there.
  bool upper_only;

  // The portable kernels' segments (multiply/sm90/list.cuh). C is then a batch of as many times the
  // matrices: the sums of each segment.
  int log2_segments;
};

// ---- Lists -------------------------------------------------------------------------------------

// Patterns of block-sparse matrices in device memory, and what multiply kernels read of a
// block-sparse product in place of norm maps.
//
// A product's matrices are 2-D: stored block e begins at row e * edge, and all have as many columns
// as a block. Hopper's kernels count cells of 64 x 64, from left to right and then downwards.
// Blocks of 128 are four cells. Of blocks of 32, up to four neighbours are a cell
// (kernels/sparse/blocks.cuh).

// int32 or int64, below 2^31 once they are checked.
struct Indices {
  const void* data;
  bool wide;

  __device__ int64_t unchecked(int64_t i) const {
    return wide ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
  }

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

struct TilePlace {
  int row, column;
};

constexpr int kTileClasses = 16;  // by the number of products, most products first

struct ProductLists {
  Pattern c;
  const int64_t* first;              // products of block c: from first[c] to first[c + 1] - 1
  const int32_t *slots_a, *slots_b;  // of each product, in the order of k
  Indices col_a;
  int64_t rows_a, rows_b;
  const int32_t *cells_a, *cells_b, *cells_c;  // of each block of 32; else null
  int log2_parts;                              // cells along an edge of a block; 0 for blocks of 32
  bool upper_only;                             // blocks below the diagonal are neither read nor set

  // Lists of Hopper's kernels. Tile `n` of a class is places[class * capacity + n].
  TilePlace* places;
  int* counts;  // of each class
  int capacity;
};

}  // namespace spamm::kernels
