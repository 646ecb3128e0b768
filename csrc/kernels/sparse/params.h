// The parameters of the kernels of block-sparse matrices, but for those of products.
#pragma once

#include <cstdint>

#include "kernels/common/parameters.h"
#include "kernels/multiply/params.h"

namespace spamm::kernels {

// Stored block e of row i, for e from crow[i] to crow[i + 1] - 1, is in column col[e].
struct CsrPattern {
  const int32_t *crow, *col;
  int64_t rows, columns, stored;
};

// As callers give it. Of int64 indices the others are copies, which check_patterns() writes.
struct GivenPattern : CsrPattern {
  Indices given_crow, given_col;
};

template <class Norm>
struct CsrMaps {
  CsrPattern a, b;
  const Norm *norm_a, *norm_b;
};

// The findings about the patterns of a call, zero at first.
struct CsrFindings {
  unsigned long long is_bad;    // a pattern is not one: no kernel may follow it
  unsigned long long products;  // of stored blocks
  unsigned long long longest;   // row of A
};

// Counts of a block row of C, or of all rows before it. `mirrored`: blocks below the diagonal.
struct RowCounts {
  unsigned long long blocks, mirrored, products;

  __host__ __device__ int64_t stored() const { return static_cast<int64_t>(blocks + mirrored); }
  __host__ __device__ RowCounts operator+(const RowCounts& other) const {
    return {blocks + other.blocks, mirrored + other.mirrored, products + other.products};
  }
};

// The numbers that the host waits for.
struct PlanTotals {
  RowCounts all;
  CsrFindings findings;
};

template <class Norm>
struct PlanParams {
  CsrMaps<Norm> maps;
  CsrPattern added;  // crow is null: nothing is added
  Tau<Norm> tau;
  bool symmetric;
  int window;  // block columns that shared memory holds
  const CsrFindings* findings;
  RowCounts* counts;  // of each row; zero at first
  unsigned* arrived;  // zero at first
  RowCounts* before;  // rows + 1
  PlanTotals* totals;
  // The output of the second kernel. slots_a is null: no lists. Mirror images are written to
  // `mirrors` as they come, and sorted later; `mirrors_written` is zero at first.
  int64_t *crow, *col, *first;
  int32_t *slots_a, *slots_b, *mirrors;
  unsigned* mirrors_written;
};

// The numbers that the host waits for, of the blocks that stay. The trace is that of `values`.
struct DropTotals {
  int64_t count;
  double trace, norm;
};

template <class Norm>
struct DropWork;

template <class Norm>
struct DropParams {
  Pattern pattern;
  const Norm* norms;
  int64_t stored;
  double below;  // no block is dropped that has this norm or a larger one
  double share;  // of norm(A) norm(B), that may be lost; negative: no limit
  const Norm *norm_a, *norm_b;
  int64_t stored_a, stored_b;
  bool symmetric;      // a block below the diagonal goes with its mirror image
  const Norm* values;  // blocks of edge x edge; null: no trace
  int edge;
  DropWork<Norm>* work;
  bool* stays;  // of each block
  // Arrays of the blocks that stay.
  int64_t *crow, *col, *numbers;
  Norm *kept_norms, *bound;
  DropTotals* totals;
};

// The place of the blocks of a matrix: one after the other, or with `cells` in quarters of cells.
struct BlockMemory {
  uint8_t* data;
  const int* cells;
  int edge, entry_bytes;

  __device__ int pitch() const { return (cells == nullptr ? edge : 2 * edge) * entry_bytes; }
  __device__ uint8_t* block(int e, int row, int column) const {
    if (cells == nullptr) return data + int64_t{e} * edge * pitch();
    const int64_t line = int64_t{cells[e]} * 2 * edge + row % 2 * edge;
    return data + line * pitch() + column % 2 * edge * entry_bytes;
  }
};

// Copies all blocks of a pattern. With `has_source`, `from` has the pattern `source`, and blocks
// that are not stored there become zeros.
struct BlockCopy {
  Pattern pattern;
  BlockMemory from, to;
  bool has_source = false;
  Pattern source = {};
  bool upper_only = false;  // nothing below the diagonal
};

}  // namespace spamm::kernels
