// Passes over stored blocks beside a product: blocks of 32 to cells of 64 x 64 and back, the blocks
// of another pattern, and mirror images. A row of thread blocks, blockIdx.x, serves a block row.
#pragma once

#include <cstdint>

#include "kernels/multiply/complete_symmetric.cuh"
#include "kernels/sparse/pattern.h"

namespace spamm::kernels {

constexpr int kBlockThreads = 256;

// The cell of each block of 32, which has the number of the first of its up to four blocks.
static __global__ void find_cells(Pattern pattern, int* cells) {
  const int row = blockIdx.x, upper = row & ~1, lower = upper + 1;
  for (int e = pattern.crow[row] + threadIdx.x; e < pattern.crow[row + 1]; e += blockDim.x) {
    const int column = pattern.col[e] & ~1;
    int first = pattern.lower_bound(upper, column);
    const bool found = first < pattern.crow[upper + 1] && pattern.col[first] <= column + 1;
    if (!found) first = pattern.lower_bound(lower, column);
    cells[e] = first;
  }
}

// Where the blocks of a matrix are: one after the other, or with `cells` in quarters of cells.
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
  bool has_source;
  Pattern source;
  bool upper_only;  // nothing below the diagonal
};

static __global__ void __launch_bounds__(kBlockThreads)
    copy_blocks(const __grid_constant__ BlockCopy p) {
  const int row = blockIdx.x, line_chunks = p.to.edge * p.to.entry_bytes / 16;
  const int end = p.pattern.crow[row + 1];
  for (int e = p.pattern.crow[row] + blockIdx.y; e < end; e += gridDim.y) {
    const int column = p.pattern.col[e];
    if (p.upper_only && column < row) continue;
    const int found = p.has_source ? p.source.find(row, column) : e;
    const uint8_t* const from = found < 0 ? nullptr : p.from.block(found, row, column);
    uint8_t* const to = p.to.block(e, row, column);
    for (int i = threadIdx.x; i < p.to.edge * line_chunks; i += kBlockThreads) {
      const int line = i / line_chunks, at = i % line_chunks * 16;
      const uint4* const chunk = reinterpret_cast<const uint4*>(from + line * p.from.pitch() + at);
      *reinterpret_cast<uint4*>(to + line * p.to.pitch() + at) = from == nullptr ? uint4{} : *chunk;
    }
  }
}

// Below the diagonal of a symmetric C goes the mirror image of what lies above it, bit for bit. On
// the way come the norms of both, with the bits of norm_map(), but for blocks of 128 (`norms` is
// null). Squares of 64 x 64, or the blocks of 32, pass through shared memory.
template <class Element>
__global__ void __launch_bounds__(kSquareThreads<Element>)
    mirror_blocks(Pattern pattern, Element* values, int edge, NormOf<Element>* norms) {
  constexpr int kThreads = kSquareThreads<Element>;
  __shared__ SharedSquare<Element> square;
  const int row = blockIdx.x, end = pattern.crow[row + 1];
  const int side = min(edge, kSquare), log2_side = 31 - __clz(side), squares = edge / side;
  for (int e = pattern.crow[row] + blockIdx.y; e < end; e += gridDim.y) {
    const int column = pattern.col[e], mirror = pattern.find(column, row);
    if (column < row && mirror >= 0) continue;
    const int64_t size = edge * edge;
    const Element* const from = values + e * size;
    Element* const to = values + mirror * size;
    for (int s = 0; s < squares * squares; ++s) {
      const int top = s / squares * side, left = s % squares * side;
      const bool on_diagonal = row == column && top == left;
      if (row == column && top > left) continue;
      __syncthreads();
#pragma unroll 16
      for (int i = threadIdx.x; i < side * side; i += kThreads) {
        const int x = i >> log2_side, y = i & (side - 1);
        const int above = on_diagonal ? min(x, y) : x, right = on_diagonal ? max(x, y) : y;
        square.at(x, y) = from[(top + above) * edge + left + right];
      }
      __syncthreads();
#pragma unroll 16
      for (int i = threadIdx.x; mirror >= 0 && i < side * side; i += kThreads) {
        const int x = i >> log2_side, y = i & (side - 1);
        if (!on_diagonal || y < x) to[(left + x) * edge + top + y] = square.at(y, x);
      }
      if (norms == nullptr) continue;
      const auto write_to = [&](int block) {
        return [=](int, int, NormOf<Element> norm) { norms[block] = norm; };
      };
      norms_in_square<false>(square, side, side, log2_side, write_to(e));
      if (mirror >= 0 && mirror != e)
        norms_in_square<true>(square, side, side, log2_side, write_to(mirror));
    }
  }
}

}  // namespace spamm::kernels
