// The pattern of a block-sparse product and its valid products, from norms alone.
//
// A thread block builds a block row of C, with counters for its block columns in shared memory, in
// windows where there are many. The first kernel counts, and its last thread block sums over the
// rows, which gives places; the second kernel writes. Products of a block are listed in the order
// of k without a sort: of 32 blocks of A's row each sets its bit in the masks of the blocks of C
// that it takes part in, and the bits below tell its place.
#pragma once

#include <cstdint>
#include <cub/block/block_scan.cuh>
#include <cuda/std/functional>

#include "kernels/common/skip_test.cuh"
#include "kernels/sparse/params.h"
#include "kernels/threshold/norm_products.cuh"

namespace spamm::kernels {

// ---- Patterns ----------------------------------------------------------------------------------

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

constexpr int kRowThreads = 512;
constexpr int kCountBytes = 1, kWriteBytes = 8;  // of shared memory for each column

template <class Norm>
struct RowWindow {
  const PlanParams<Norm>& params;
  int64_t row, begin;
  int width;
  Norm tau;

  // Calls visit(stored blocks of A and B, place in the window) for valid products.
  template <class Visit>
  __device__ void each_valid(int64_t from, int64_t to, const Visit& visit) const {
    each_product(params.maps, from, to,
                 [&](int64_t slot_a, int64_t slot_b, int64_t column, Norm a, Norm b) {
                   const int64_t place = column - begin;
                   if (place >= 0 && place < width && is_valid(norm_product(a, b), tau)) {
                     visit(slot_a, slot_b, static_cast<int>(place));
                   }
                 });
  }
  template <class Visit>
  __device__ void each_valid(const Visit& visit) const {
    each_valid(params.maps.a.crow[row], params.maps.a.crow[row + 1], visit);
  }
  template <class Visit>
  __device__ void each_added(const Visit& visit) const {
    if (params.added.crow == nullptr) return;
    const int64_t last = params.added.crow[row + 1];
    for (int64_t e = params.added.crow[row] + threadIdx.x; e < last; e += blockDim.x) {
      const int64_t place = params.added.col[e] - begin;
      if (place >= 0 && place < width) visit(static_cast<int>(place));
    }
  }
};

// Calls visit(window) for the windows of the thread block's row, which start at the diagonal of a
// symmetric C; for none of a row without a block of A or of what is added. `memory` then has
// `bytes` for each column, zero.
template <class Norm, class Visit>
__device__ void each_window(const PlanParams<Norm>& params, unsigned* memory, int bytes,
                            const Visit& visit) {
  const int64_t row = blockIdx.x, columns = params.maps.b.columns;
  const auto is_empty = [&](const int32_t* crow) {
    return crow == nullptr || crow[row] == crow[row + 1];
  };
  if (is_empty(params.maps.a.crow) && is_empty(params.added.crow)) return;
  const Norm tau = params.tau.value();
  for (int64_t begin = params.symmetric ? row : 0; begin < columns; begin += params.window) {
    const int width = static_cast<int>(min(int64_t{params.window}, columns - begin));
    const int words = (width * bytes + 3) / 4;
    for (int i = threadIdx.x; i < words; i += kRowThreads) memory[i] = 0;
    __syncthreads();
    visit(RowWindow<Norm>{params, row, begin, width, tau});
    __syncthreads();
  }
}

// Counts the blocks and products of the thread block's row.
template <class Norm>
__device__ void count_row(const PlanParams<Norm>& params, unsigned* memory) {
  auto* const is_stored = reinterpret_cast<unsigned char*>(memory);
  unsigned blocks = 0, products = 0;  // fewer than 2^31 in a row
  each_window(params, memory, kCountBytes, [&](const RowWindow<Norm>& window) {
    window.each_valid([&](int64_t, int64_t, int place) {
      is_stored[place] = 1;
      ++products;
    });
    window.each_added([&](int place) { is_stored[place] = 1; });
    __syncthreads();
    for (int c = threadIdx.x; c < window.width; c += kRowThreads) {
      if (!is_stored[c]) continue;
      ++blocks;
      const int64_t column = window.begin + c;
      if (params.symmetric && column > window.row) {
        atomicAdd(&params.counts[column].mirrored, 1ull);
      }
    }
  });
  blocks = __reduce_add_sync(~0u, blocks), products = __reduce_add_sync(~0u, products);
  RowCounts& counts = params.counts[blockIdx.x];
  if (threadIdx.x % 32 == 0 && (blocks | products) != 0) {
    atomicAdd(&counts.blocks, static_cast<unsigned long long>(blocks));
    atomicAdd(&counts.products, static_cast<unsigned long long>(products));
  }
}

// The sums of the rows before each, and of all, by one thread block.
template <class Norm>
__device__ void sum_rows(const PlanParams<Norm>& params) {
  using Scan = cub::BlockScan<RowCounts, kRowThreads, cub::BLOCK_SCAN_WARP_SCANS>;
  __shared__ typename Scan::TempStorage memory;
  const int64_t rows = params.maps.a.rows;
  RowCounts all{};
  for (int64_t first = 0; first <= rows; first += kRowThreads) {
    const int64_t row = first + threadIdx.x;
    RowCounts own = row < rows ? params.counts[row] : RowCounts{}, sum;
    Scan(memory).ExclusiveScan(own, own, RowCounts{}, ::cuda::std::plus<>{}, sum);
    if (row <= rows) params.before[row] = all + own;
    all = all + sum;
    __syncthreads();
  }
  if (threadIdx.x == 0) *params.totals = {all, *params.findings};
}

// A thread block for each row, and at least one.
template <class Norm>
__global__ void __launch_bounds__(kRowThreads)
    count_rows(const __grid_constant__ PlanParams<Norm> params) {
  extern __shared__ unsigned row_memory[];
  if (blockIdx.x < params.maps.a.rows && !params.findings->is_bad) count_row(params, row_memory);
  if (is_last_block(params.arrived)) sum_rows(params);
}

template <class Norm>
__global__ void __launch_bounds__(kRowThreads)
    write_rows(const __grid_constant__ PlanParams<Norm> params) {
  using Scan = cub::BlockScan<unsigned long long, kRowThreads, cub::BLOCK_SCAN_WARP_SCANS>;
  __shared__ typename Scan::TempStorage scan_memory;
  extern __shared__ unsigned row_memory[];
  const int64_t row = blockIdx.x, rows = params.maps.a.rows;
  const RowCounts before = params.before[row], all = params.before[rows];
  int64_t next = before.stored();  // block of C
  auto product = static_cast<int64_t>(before.products);
  if (threadIdx.x == 0) params.crow[row] = next;
  if (row == rows - 1 && threadIdx.x == 0) {
    params.crow[rows] = all.stored();
    params.first[all.stored()] = static_cast<int64_t>(all.products);
  }
  const auto mirrored = static_cast<int64_t>(params.counts[row].mirrored);
  for (int64_t c = threadIdx.x; c < mirrored; c += kRowThreads) params.first[next + c] = product;
  next += mirrored;

  each_window(params, row_memory, kWriteBytes, [&](const RowWindow<Norm>& window) {
    // Counts of each column: products twice, plus 1 for a block that is added; then where the next
    // product goes. And the mask.
    unsigned* const places = row_memory;
    unsigned* const masks = row_memory + window.width;
    window.each_valid([&](int64_t, int64_t, int place) { atomicAdd(&places[place], 2u); });
    window.each_added([&](int place) { atomicOr(&places[place], 1u); });
    __syncthreads();

    // Each thread numbers a run of columns. An odd length keeps threads on different banks.
    const int run = ((window.width - 1) / kRowThreads + 1) | 1;
    const int from = min(static_cast<int>(threadIdx.x) * run, window.width);
    const int to = min(from + run, window.width);
    unsigned long long sum = 0, total;  // blocks << 32 | products
    for (int c = from; c < to; ++c) {
      if (places[c] != 0) sum += (1ull << 32) + places[c] / 2;
    }
    Scan(scan_memory).ExclusiveSum(sum, sum, total);
    int64_t block = next + static_cast<int64_t>(sum >> 32);
    auto place = static_cast<unsigned>(sum);
    for (int c = from; c < to; ++c) {
      if (places[c] == 0) continue;
      const int64_t column = window.begin + c;
      params.col[block] = column;
      params.first[block++] = product + place;
      const unsigned own = places[c] / 2;
      places[c] = place;
      place += own;
      if (params.symmetric && column > row) {
        const unsigned at = atomicAdd(&params.mirrors_written[column], 1u);
        params.mirrors[params.before[column].stored() + at] = static_cast<int32_t>(row);
      }
    }
    const int64_t last = params.slots_a ? params.maps.a.crow[row + 1] : 0;
    for (int64_t slot = params.maps.a.crow[row]; slot < last; slot += 32) {
      __syncthreads();
      const int64_t end = min(slot + 32, last);
      window.each_valid(slot, end, [&](int64_t slot_a, int64_t, int c) {
        atomicOr(&masks[c], 1u << static_cast<int>(slot_a - slot));
      });
      __syncthreads();
      window.each_valid(slot, end, [&](int64_t slot_a, int64_t slot_b, int c) {
        const unsigned below = masks[c] & ((1u << static_cast<int>(slot_a - slot)) - 1);
        const int64_t at = product + places[c] + __popc(below);
        params.slots_a[at] = static_cast<int32_t>(slot_a);
        params.slots_b[at] = static_cast<int32_t>(slot_b);
      });
      __syncthreads();
      for (int c = threadIdx.x; c < window.width; c += kRowThreads) {
        places[c] += __popc(masks[c]);
        masks[c] = 0;
      }
    }
    next += static_cast<int64_t>(total >> 32);
    product += static_cast<unsigned>(total);
  });
}

// Sorts each row's mirror images into the pattern. Rows have few: each finds its rank.
__global__ void __launch_bounds__(kRowThreads)
    sort_mirrors(const int32_t* mirrors, const unsigned* counts, const int64_t* crow,
                 int64_t* col) {
  const int64_t first = crow[blockIdx.x];
  const int count = static_cast<int>(counts[blockIdx.x]);
  for (int e = threadIdx.x; e < count; e += kRowThreads) {
    const int32_t own = mirrors[first + e];
    int rank = 0;
    for (int other = 0; other < count; ++other) rank += mirrors[first + other] < own;
    col[first + rank] = own;
  }
}

}  // namespace spamm::kernels
