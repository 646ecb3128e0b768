// The check of block-sparse patterns, and the loop over the products of some of A's stored blocks.
#pragma once

#include <cstdint>

#include "kernels/common/skip_test.cuh"
#include "kernels/sparse/params.h"

namespace spamm::kernels {

constexpr int kCheckThreads = 256, kCheckWarps = kCheckThreads / 32;

// Checks up to three patterns and counts the products of the first two. Rows of b follow those of
// a, and the addend's follow them. A warp for each row; for each matrix at least one.
static __global__ void __launch_bounds__(kCheckThreads)
    check_patterns(GivenPattern a, GivenPattern b, GivenPattern added, CsrFindings* findings) {
  const int lane = threadIdx.x % 32;
  int64_t row = int64_t{blockIdx.x} * kCheckWarps + threadIdx.x / 32;
  GivenPattern x = a;
  bool is_a = true;
  for (const GivenPattern& next : {b, added}) {
    if (row < max(x.rows, int64_t{1})) break;
    row -= max(x.rows, int64_t{1});
    x = next, is_a = false;
  }
  if (x.crow == nullptr || row >= max(x.rows, int64_t{1})) return;
  const auto copy = [](const Indices& given, const int32_t* copies, int64_t i, int64_t index) {
    if (given.wide) const_cast<int32_t*>(copies)[i] = static_cast<int32_t>(index);
  };
  const Indices &crow = x.given_crow, &col = x.given_col;
  bool fits = (row > 0 || crow.unchecked(0) == 0) &&
              (row < x.rows - 1 || crow.unchecked(x.rows) == x.stored);
  unsigned long long products = 0;
  if (row < x.rows) {
    const int64_t first = crow.unchecked(row), last = crow.unchecked(row + 1);
    if (lane < 2) copy(crow, x.crow, row + lane, lane == 0 ? first : last);
    fits = fits && 0 <= first && first <= last && last <= x.stored;
    for (int64_t e = first + lane; fits && e < last; e += 32) {
      const int64_t j = col.unchecked(e);
      copy(col, x.col, e, j);
      fits = j >= 0 && j < x.columns && (e == first || col.unchecked(e - 1) < j);
      if (is_a && fits) products += b.given_crow.unchecked(j + 1) - b.given_crow.unchecked(j);
    }
    if (is_a && lane == 0 && last > first) {
      atomicMax(&findings->longest, static_cast<unsigned long long>(last - first));
    }
  }
  if (!fits) findings->is_bad = 1;
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    products += __shfl_xor_sync(~0u, products, distance);
  }
  if (lane == 0 && products > 0) atomicAdd(&findings->products, products);
}

// Calls visit(stored block of A, stored block of B, column, norm of A, norm of B) for the products
// of A's stored blocks from `from` to `to` - 1, over the thread block, in no order.
template <class Norm, class Visit>
__device__ void each_product(const CsrMaps<Norm>& maps, int64_t from, int64_t to,
                             const Visit& visit) {
  constexpr int kAhead = 4;  // blocks of A whose rows of B are read together
  const int warps = blockDim.x / 32;
  for (int64_t own = from + threadIdx.x / 32; own < to; own += kAhead * warps) {
    int64_t begin[kAhead];
    int length[kAhead], longest = 0;
    Norm norm_a[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int64_t slot = own + i * warps;
      length[i] = 0;
      if (slot < to) {
        const int64_t k = maps.a.col[slot];
        begin[i] = maps.b.crow[k];
        length[i] = static_cast<int>(maps.b.crow[k + 1] - begin[i]);
        norm_a[i] = maps.norm_a[slot];
      }
      longest = max(longest, length[i]);
    }
    for (int at = threadIdx.x % 32; at < longest; at += 32) {
      int column[kAhead];
      Norm norm_b[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (at < length[i]) column[i] = maps.b.col[begin[i] + at];
        if (at < length[i]) norm_b[i] = maps.norm_b[begin[i] + at];
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (at < length[i]) {
          visit(own + i * warps, begin[i] + at, int64_t{column[i]}, norm_a[i], norm_b[i]);
        }
      }
    }
  }
}

}  // namespace spamm::kernels
