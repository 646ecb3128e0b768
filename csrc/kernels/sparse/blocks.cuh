// Passes over stored blocks beside a product: blocks of 32 to cells of 64 x 64 and back, the blocks
// of another pattern, mirror images, and the tiles of C. blockIdx.x is a block row.
#pragma once

#include <cstdint>

#include "kernels/multiply/complete_symmetric.cuh"
#include "kernels/multiply/params.h"
#include "kernels/sparse/params.h"

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
__global__ void __launch_bounds__(kSquareThreads, sizeof(Element) < 4 ? 0 : 2)  // spills nothing
    mirror_blocks(Pattern pattern, Element* values, int edge, NormOf<Element>* norms) {
  constexpr int kThreads = kSquareThreads;
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
#pragma unroll 4
      for (int i = threadIdx.x; i < side * side; i += kThreads) {
        const int x = i >> log2_side, y = i & (side - 1);
        const int above = on_diagonal ? min(x, y) : x, right = on_diagonal ? max(x, y) : y;
        square.at(x, y) = from[(top + above) * edge + left + right];
      }
      __syncthreads();
#pragma unroll 4
      for (int i = threadIdx.x; mirror >= 0 && i < side * side; i += kThreads) {
        const int x = i >> log2_side, y = i & (side - 1);
        if (!on_diagonal || y < x) to[(left + x) * edge + top + y] = square.at(y, x);
      }
      if (norms == nullptr) continue;
      const auto write_to = [&](int block) { return [=](int, int) { return block; }; };
      norms_in_square<false>(square, side, side, log2_side, norms, write_to(e));
      if (mirror >= 0 && mirror != e)
        norms_in_square<true>(square, side, side, log2_side, norms, write_to(mirror));
    }
  }
}

constexpr int kFindTilesThreads = 128;

// The tiles of a block-sparse C: all of an aligned grid in which a block is stored. Tiles with most
// products come first, in classes of powers of two; in each, roughly from top to bottom, so that
// tiles in flight share operands in L2. No bit of the result depends on their order. A tile has
// height x width parts of blocks. The first stored block of a tile lists it.
static __global__ void __launch_bounds__(kFindTilesThreads)
    find_tiles(const __grid_constant__ ProductLists p, int height, int width) {
  const int row = blockIdx.x, parts = 1 << p.log2_parts, end = p.c.crow[row + 1];
  const auto first_of = [&](int64_t tile, int size) { return tile * size >> p.log2_parts; };
  const auto end_of = [&](int64_t tile, int size) {
    return (((tile + 1) * size - 1) >> p.log2_parts) + 1;
  };
  const auto list = [&](int block, int tile_row, int tile_column) {
    int64_t products = 0;
    bool is_first = true;
    const int last = min(end_of(tile_row, height), int64_t{p.c.rows});
    for (int i = first_of(tile_row, height); i < last; ++i) {
      const int64_t from = first_of(tile_column, width);
      const int begin = p.c.lower_bound(i, p.upper_only ? max(from, int64_t{i}) : from);
      const int past = p.c.lower_bound(i, end_of(tile_column, width));
      if (begin >= past) continue;
      if (is_first && begin != block) return;
      is_first = false;
      products += p.first[past] - p.first[begin];
    }
    const int log2 = 63 - __clzll(products + 1);
    const int number = kTileClasses - 1 - min(log2, kTileClasses - 1);
    const int64_t before = int64_t{number} * p.capacity;
    p.places[before + atomicAdd(p.counts + number, 1)] = {tile_row, tile_column};
  };
  for (int e = p.c.crow[row] + blockIdx.y * blockDim.x + threadIdx.x; e < end;
       e += gridDim.y * blockDim.x) {
    const int column = p.c.col[e];
    if (p.upper_only && column < row) continue;
    for (int i = row * parts / height; i <= (row * parts + parts - 1) / height; ++i)
      for (int j = column * parts / width; j <= (column * parts + parts - 1) / width; ++j)
        list(e, i, j);
  }
}

}  // namespace spamm::kernels
