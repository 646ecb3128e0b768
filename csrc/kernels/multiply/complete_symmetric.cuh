// Completes a symmetric product: below the diagonal of C goes the mirror image of what lies above
// it. On the way C's norm map is computed, with the bits of norm_map().
//
// A thread block reads a square of C above the diagonal once, writes the square that mirrors it,
// and sums the squares of both, each in the order of its own rows.
#pragma once

#include <cstdint>

#include "kernels/common/numeric.cuh"
#include "kernels/common/overlap.cuh"
#include "kernels/common/parameters.h"
#include "kernels/norm_map/norm_map.cuh"

namespace spamm::kernels {

constexpr int kLog2Square = 6, kSquare = 1 << kLog2Square;

// Threads of a square. As many as sum its norm would be too few to copy it.
constexpr int kSquareThreads = kNormThreads;

// C is (batch, size, size), and its rows are contiguous.
template <class Element>
struct SymmetricParams {
  Element* c;
  int64_t batch_stride, leading;  // leading: the stride of a row
  int64_t size;
  NormOf<Element>* norms;  // (batch, blocks, blocks), contiguous; null: not wanted
  int log2_block;          // 5 or 6
};

// A square in shared memory. Rows are padded so that columns spread over all banks.
template <class Element>
struct SharedSquare {
  static constexpr int kPitch = kSquare + 1;
  alignas(16) Element entries[kSquare * kPitch];  // chunks are read from aligned 16 bytes

  __device__ Element& at(int row, int column) { return entries[row * kPitch + column]; }
};

struct SquarePart {
  int64_t row, column;
  int rows, columns;

  __device__ SquarePart(GridPlace square, int64_t size)
      : row(static_cast<int64_t>(square.row) * kSquare),
        column(static_cast<int64_t>(square.column) * kSquare),
        rows(static_cast<int>(min(size - row, int64_t{kSquare}))),
        columns(static_cast<int>(min(size - column, int64_t{kSquare}))) {}
};

// Writes to norms[number(line, entry)] the norms of the blocks in the first rows and columns of a
// square, or with kMirrored in the square that mirrors it. All threads call it; one of each block
// writes.
template <bool kMirrored, class Element, class Number>
__device__ void norms_in_square(const SharedSquare<Element>& square, int rows, int columns,
                                int log2_block, NormOf<Element>* norms, const Number& number) {
  using Norm = NormOf<Element>;
  constexpr int kPitch = SharedSquare<Element>::kPitch;
  NormMapParams<Norm> p{};
  p.log2_block_lines = p.log2_block_length = log2_block;
  p.line_stride = kMirrored ? 1 : kPitch;
  p.entry_stride = kMirrored ? kPitch : 1;
  const NormGroup group(norm_threads<Element>(2 * log2_block));
  const int log2_blocks = kLog2Square - log2_block;
  const int line = group.index >> log2_blocks << log2_block;
  const int entry = (group.index & ((1 << log2_blocks) - 1)) << log2_block;
  const int lines_left = (kMirrored ? columns : rows) - line;
  const int length_left = (kMirrored ? rows : columns) - entry;
  const bool exists = lines_left > 0 && length_left > 0;
  int to = exists && group.thread == 0 ? number(line, entry) : -1;
  asm volatile("" : "+r"(to));  // else all that it is found from is kept, and spilled
  const NormBlock<Element> block{p, square.entries + line * p.line_stride + entry * p.entry_stride,
                                 exists ? lines_left : 0, length_left};
  Norm sum = 0;
  bool nonzero = false;
  sum_squares(block, group.thread, group.threads, sum, nonzero);
  const Norm norm = norm_of_shares<true>(block, group, exists, sum, nonzero);
  if (to >= 0) norms[to] = norm;
}

// The same, to the map.
template <bool kMirrored, class Element>
__device__ void write_norms(const SymmetricParams<Element>& params, int64_t batch,
                            const SquarePart& part, const SharedSquare<Element>& square) {
  const auto number = [&](int line, int entry) {
    const int64_t blocks = ((params.size - 1) >> params.log2_block) + 1;
    const int64_t row = ((kMirrored ? part.column : part.row) + line) >> params.log2_block;
    const int64_t column = ((kMirrored ? part.row : part.column) + entry) >> params.log2_block;
    return static_cast<int>((batch * blocks + row) * blocks + column);
  };
  norms_in_square<kMirrored>(square, part.rows, part.columns, params.log2_block, params.norms,
                             number);
}

// A thread block for each square on and above the diagonal, of which there are `squares` along it.
template <class Element>
__global__ void __launch_bounds__(kSquareThreads)
    complete_symmetric(const SymmetricParams<Element> params, int squares) {
  constexpr int kThreads = kSquareThreads, kEntries = kSquare * kSquare;
  __shared__ SharedSquare<Element> square;
  let_next_kernel_start();
  wait_for_previous_kernel();
  const int rows = folded_rows(squares), columns = folded_columns(squares);
  const int64_t batch = blockIdx.x / (rows * columns);
  const int in_batch = static_cast<int>(blockIdx.x - batch * rows * columns);
  const GridPlace place = unfold({in_batch / columns, in_batch % columns}, squares);
  const bool on_diagonal = place.row == place.column;
  const SquarePart part(place, params.size);
  Element* const c = params.c + batch * params.batch_stride;

  const Element* const upper = c + part.row * params.leading + part.column;
#pragma unroll
  for (int i = threadIdx.x; i < kEntries; i += kThreads) {
    const int row = i / kSquare, column = i % kSquare;
    const bool inside = row < part.rows && column < part.columns;
    square.at(row, column) = inside ? upper[row * params.leading + column] : Element(0.0f);
  }
  __syncthreads();
  if (on_diagonal) {
    for (int i = threadIdx.x; i < kEntries; i += kThreads) {
      const int row = i / kSquare, column = i % kSquare;
      if (column < row) square.at(row, column) = square.at(column, row);
    }
    __syncthreads();
  }
  Element* const lower = c + part.column * params.leading + part.row;
#pragma unroll
  for (int i = threadIdx.x; i < kEntries; i += kThreads) {
    const int row = i / kSquare, column = i % kSquare;
    if (row < part.columns && column < part.rows && (!on_diagonal || column < row)) {
      lower[row * params.leading + column] = square.at(column, row);
    }
  }
  if (params.norms == nullptr) return;
  write_norms<false>(params, batch, part, square);
  if (!on_diagonal) write_norms<true>(params, batch, part, square);
}

}  // namespace spamm::kernels
