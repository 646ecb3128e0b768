// C = alpha * (A B over valid blocks) + beta * input where K is short: a sum of few outer products,
// whose time is what it takes to write C. Float32 and float64 by FMA.
//
// A thread block brings all of K into shared memory, entry by entry, at whatever address operands
// lie. A warp computes 16 rows of 64 columns. A lane has every 32nd of these, so that a warp stores
// whole lines, at whatever address rows begin. A sum runs in the order of K. The code is short,
// since a thread block that runs once waits for its instructions.
#pragma once

#include "kernels/multiply/sm80/multiply.cuh"

namespace spamm::kernels {

template <class Element_, TileConfig kTile>
struct ShortConfig {
  using Element = Element_;
  using Params = MultiplyParams<Element>;
  static constexpr int kTileM = kTile.rows, kTileN = kTile.columns;
  static constexpr int kWarpRows = kTile.warp_rows;
  static constexpr int kWarps = kTileM / kWarpRows, kThreads = 32 * kWarps;
  static constexpr int kBlocksPerSm = kTile.blocks_per_multiprocessor;
  // From k to k in shared memory. Rows of A are read 16 bytes at a time.
  static constexpr int kChunk = 16 / sizeof(Element);
  static constexpr int kPitchA = kTileM + kChunk, kPitchB = kTileN + 1;
};

// Starts the copies of rows of A (or columns of B) from `first` on, at most kExtent, k by k. What
// lies beyond the operand's edge keeps what memory holds, which only reaches sums beyond C's.
template <class Config, int kExtent, int kPitch>
__device__ __forceinline__ void copy_short(typename Config::Element* to, const Operand& from,
                                           int64_t batch, int64_t first, int64_t size, int depth) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int extent = static_cast<int>(min(size - first, int64_t{kExtent}));
  const int lines = from.k_major ? extent : depth, length = from.k_major ? depth : extent;
  // The distances of lines and of their entries in shared memory.
  const int line_step = from.k_major ? 1 : kPitch, step = from.k_major ? kPitch : 1;
  const auto* source = static_cast<const typename Config::Element*>(from.data) +
                       batch * from.batch_stride + first * (from.k_major ? from.leading : 1) +
                       warp * from.leading + lane;
  to += warp * line_step + lane * step;
#pragma unroll 1
  for (int line = warp; line < lines; line += Config::kWarps) {
#pragma unroll
    for (int i = 0; i < std::max(kExtent, kShortDepth); i += 32) {
      if (lane + i < length) copy_entry_async(to + i * step, source + i);
    }
    to += Config::kWarps * line_step, source += Config::kWarps * from.leading;
  }
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerSm)
    multiply_short(const __grid_constant__ typename Config::Params p, Divisor by_columns,
                   Divisor by_rows) {
  using Element = typename Config::Element;
  constexpr int kRows = Config::kTileM / 32, kColumns = Config::kTileN / 32;
  constexpr int kWarpRows = Config::kWarpRows;
  using Chunk = Neighbours<Element, Config::kChunk>;
  extern __shared__ __align__(128) char shared[];
  int batch, tile_row, tile_column;
  by_columns(tile_row, tile_column, static_cast<int>(blockIdx.x));
  by_rows(batch, tile_row, tile_row);
  const int64_t first_row = static_cast<int64_t>(tile_row) * Config::kTileM;
  const int64_t first_column = static_cast<int64_t>(tile_column) * Config::kTileN;
  const int depth = static_cast<int>(p.k), lane = threadIdx.x % 32;
  const int warp_row = __shfl_sync(~0u, threadIdx.x / 32, 0) * kWarpRows;
  auto* const stage_a = reinterpret_cast<Element*>(shared);
  Element* const stage_b = stage_a + depth * Config::kPitchA;
  copy_short<Config, Config::kTileM, Config::kPitchA>(stage_a, p.a, batch, first_row, p.m, depth);
  copy_short<Config, Config::kTileN, Config::kPitchB>(stage_b, p.b, batch, first_column, p.n,
                                                      depth);
  commit_copies();

  const Element tau = p.tau.value();
  Element sums[kWarpRows][kColumns] = {};
  wait_copies<0>();
  __syncthreads();
#pragma unroll 1
  for (int from = 0; from < depth; from += 32) {
    uint32_t mask = ~0u;
    if (tau != -INFINITY) {  // else nothing is skipped, and there may be no norms
      mask = valid_mask<kRows, kColumns>(p, tau, batch, tile_row * kRows, tile_column * kColumns,
                                         from / 32) >>
             warp_row / 32 * kColumns;
    }
    const Element *a = stage_a + from * Config::kPitchA + warp_row,
                  *b = stage_b + from * Config::kPitchB + lane;
    const int steps = min(depth - from, 32);
#pragma unroll 2
    for (int k = 0; k < steps; ++k) {
      Element of_a[kWarpRows], of_b[kColumns];
#pragma unroll
      for (int i = 0; i < kWarpRows; i += Config::kChunk) {
        *reinterpret_cast<Chunk*>(of_a + i) = *reinterpret_cast<const Chunk*>(a + i);
      }
#pragma unroll
      for (int j = 0; j < kColumns; ++j) of_b[j] = b[32 * j];
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        if ((mask >> j & 1) == 0) continue;
#pragma unroll
        for (int i = 0; i < kWarpRows; ++i) sums[i][j] = fma(of_a[i], of_b[j], sums[i][j]);
      }
      a += Config::kPitchA, b += Config::kPitchB;
    }
  }

  // The rows of the warp and the columns of the lane that lie in C.
  const int64_t row = first_row + warp_row, column = first_column + lane;
  const int rows = static_cast<int>(min(p.m - row, int64_t{kWarpRows}));
  const int columns = static_cast<int>(min(p.n - column, int64_t{Config::kTileN}));
  const auto for_each_row = [&](const auto& visit) {
#pragma unroll
    for (int i = 0; i < kWarpRows; ++i) {
      if (i < rows) visit(sums[i]);
    }
  };
  if (p.alpha != 1) {
    for_each_row([&](Element(&of_row)[kColumns]) {
#pragma unroll
      for (Element& sum : of_row) sum *= p.alpha;
    });
  }
  if (p.input != nullptr) {
    const int64_t* strides = p.input_strides;
    const auto* input = static_cast<const Element*>(p.input) + batch * strides[0] +
                        row * strides[1] + column * strides[2];
    for_each_row([&](Element(&of_row)[kColumns]) {
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        if (32 * j < columns) of_row[j] = fma(p.beta, input[32 * j * strides[2]], of_row[j]);
      }
      input += strides[1];
    });
  }
  auto* to = static_cast<Element*>(p.c) + batch * p.c_batch_stride + row * p.c_leading + column;
  for_each_row([&](const Element(&of_row)[kColumns]) {
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      if (32 * j < columns) to[32 * j] = of_row[j];
    }
    to += p.c_leading;
  });
}

}  // namespace spamm::kernels

namespace spamm::kernels::sm80 {

// Computes p, whose K is at most kShortDepth.
template <class Element, TileConfig kTile>
cudaError_t multiply_short(const MultiplyParams<Element>& p, cudaStream_t stream) {
  using Config = ShortConfig<Element, kTile>;
  const auto kernel = kernels::multiply_short<Config>;
  constexpr int kBytes = (Config::kPitchA + Config::kPitchB) * sizeof(Element);  // of each k
  const cudaError_t error =
      allow_shared_memory(reinterpret_cast<const void*>(kernel), kShortDepth * kBytes);
  if (error != cudaSuccess) return error;
  const auto rows = static_cast<int>((p.m - 1) / Config::kTileM + 1);
  const auto columns = static_cast<int>((p.n - 1) / Config::kTileN + 1);
  return launch(kernel, static_cast<unsigned>(p.batch * rows * columns), Config::kThreads,
                static_cast<int>(p.k) * kBytes, /*overlap_previous=*/false, stream, p,
                Divisor(columns), Divisor(rows));
}

}  // namespace spamm::kernels::sm80
