// How large the terms are that make up a block of C = A B, for operands in split parts: the largest
// product a[i, k] * b[k, j] in it, over all k, as a power of two. The multiply compares with it
// what split parts lose (multiply/sm90/split/stage.cuh): digits that are small beside the terms of
// the whole sum need no exact product.
//
// A product of matrices in which + is max and * is +, over the profiles of the blocks. It depends
// on a row of blocks of A and a column of blocks of B alone, and not on tau: parts of a product
// find the numbers of the whole.
#pragma once

#include <cuda_runtime.h>

#include "kernels/common/launch.cuh"
#include "kernels/common/overlap.cuh"
#include "kernels/norm_map/split_params.h"

namespace spamm::kernels {

constexpr int kTermsEdge = 32;                     // blocks of C along an edge of a thread block
constexpr int kTermsThreads = 256, kTermsOwn = 4;  // each thread: 1 row, 4 columns
constexpr int16_t kNoTerms = 0x7fff;               // all terms are 0

// The largest terms of a tile of kTermsEdge x kTermsEdge blocks of C.
__global__ void __launch_bounds__(kTermsThreads)
    find_largest_terms(const __grid_constant__ LargestTermsParams p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  // A word holds two neighbouring k. The pad puts the rows of a column into different banks.
  constexpr int kWords = kSplitBlock / 2;
  __shared__ uint32_t below_a[kTermsEdge][kWords + 1], below_b[kTermsEdge][kWords + 1];
  __shared__ int exponents_a[kTermsEdge], exponents_b[kTermsEdge];
  let_next_kernel_start();
  wait_for_previous_kernel();

  const int tile_columns = (p.b.extent - 1) / kTermsEdge + 1;
  const int tile_rows = (p.a.extent - 1) / kTermsEdge + 1;
  const int first_column = blockIdx.x % tile_columns * kTermsEdge;
  const int first_row = blockIdx.x / tile_columns % tile_rows * kTermsEdge;
  const int batch = blockIdx.x / tile_columns / tile_rows, depth = p.a.depth;
  const int64_t rows_before = static_cast<int64_t>(p.a_has_batch ? batch : 0) * p.a.extent;
  const int64_t columns_before = static_cast<int64_t>(p.b_has_batch ? batch : 0) * p.b.extent;
  const auto number = [&](const SplitOperand& x, int64_t before, int i, int k) {
    return (before + min(i, x.extent - 1)) * depth + k;
  };

  // Where no block of A, or none of B, is wide, nobody asks.
  int wide_a = 0, wide_b = 0;
  for (int i = threadIdx.x; i < kTermsEdge * depth; i += kTermsThreads) {
    const int line = i / depth, k = i % depth;
    wide_a |= p.a.headers[number(p.a, rows_before, first_row + line, k)].kinds & kSplitWide;
    wide_b |= p.b.headers[number(p.b, columns_before, first_column + line, k)].kinds & kSplitWide;
  }
  if (!__syncthreads_or(wide_a) || !__syncthreads_or(wide_b)) return;

  const int row = threadIdx.x / (kTermsEdge / kTermsOwn);
  const int column = threadIdx.x % (kTermsEdge / kTermsOwn);
  constexpr int kNone = -0x8000;
  int largest[kTermsOwn];
#pragma unroll
  for (int& each : largest) each = kNone;
  for (int k = 0; k < depth; ++k) {
    __syncthreads();
    for (int i = threadIdx.x; i < kTermsEdge * kWords; i += kTermsThreads) {
      const int line = i / kWords, word = i % kWords;
      const auto words = [&](const SplitOperand& x, int64_t at) {
        return reinterpret_cast<const uint32_t*>(x.profiles[at].below);
      };
      below_a[line][word] = words(p.a, number(p.a, rows_before, first_row + line, k))[word];
      below_b[line][word] = words(p.b, number(p.b, columns_before, first_column + line, k))[word];
    }
    if (threadIdx.x < kTermsEdge) {
      const int line = threadIdx.x;
      exponents_a[line] = p.a.headers[number(p.a, rows_before, first_row + line, k)].exponent;
      exponents_b[line] = p.b.headers[number(p.b, columns_before, first_column + line, k)].exponent;
    }
    __syncthreads();
    uint32_t least[kTermsOwn];
#pragma unroll
    for (uint32_t& each : least) each = 0xffffffff;
#pragma unroll 8
    for (int word = 0; word < kWords; ++word) {
      const uint32_t a = below_a[row][word];
#pragma unroll
      for (int i = 0; i < kTermsOwn; ++i) {
        least[i] =
            __viaddmin_u16x2(a, below_b[column + i * (kTermsEdge / kTermsOwn)][word], least[i]);
      }
    }
#pragma unroll
    for (int i = 0; i < kTermsOwn; ++i) {
      const int below = min(least[i] & 0xffff, least[i] >> 16);
      const int top = exponents_a[row] + exponents_b[column + i * (kTermsEdge / kTermsOwn)];
      if (below < kNothingAtK) largest[i] = max(largest[i], top + 2 * kSplitBits - below);
    }
  }
#pragma unroll
  for (int i = 0; i < kTermsOwn; ++i) {
    const int at_row = first_row + row;
    const int at_column = first_column + column + i * (kTermsEdge / kTermsOwn);
    if (at_row >= p.a.extent || at_column >= p.b.extent) continue;
    p.terms[(static_cast<int64_t>(batch) * p.a.extent + at_row) * p.b.extent + at_column] =
        largest[i] == kNone ? kNoTerms : static_cast<int16_t>(largest[i]);
  }
#else
  __trap();  // compiled for another target: fail, do not leave the output unwritten
#endif
}

inline cudaError_t launch_largest_terms(const LargestTermsParams& p, int64_t batch,
                                        cudaStream_t stream) {
  const auto tiles = [](int extent) {
    return static_cast<unsigned>((extent - 1) / kTermsEdge + 1);
  };
  const auto grid = static_cast<unsigned>(tiles(p.b.extent) * tiles(p.a.extent) * batch);
  return launch(find_largest_terms, grid, kTermsThreads, 0, /*overlap_previous=*/true, stream, p);
}

}  // namespace spamm::kernels
