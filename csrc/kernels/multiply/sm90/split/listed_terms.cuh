// The largest terms (largest_terms.cuh) of the granules of a block-sparse C: of listed products. A
// warp computes those of one block of C, or of one part of a block of 128.
#pragma once

#include <cstdint>

#include "kernels/multiply/lists.h"
#include "kernels/multiply/sm90/split/largest_terms.cuh"

namespace spamm::kernels {

// blockIdx.x counts block rows; their blocks are dealt out along blockIdx.y.
template <int kGranules>
__global__ void __launch_bounds__(kTermsThreads)
    find_listed_terms(const __grid_constant__ LargestTermsParams p,
                      const __grid_constant__ ProductLists lists) {
  const int row = blockIdx.x, log2_parts = lists.log2_parts, parts = 1 << log2_parts;
  const int lane = threadIdx.x % 32, stride = gridDim.y * kTermsWarps;
  const int64_t end = int64_t{lists.c.crow[row + 1]} << 2 * log2_parts;
  for (int64_t at = (int64_t{lists.c.crow[row]} << 2 * log2_parts) + blockIdx.y * kTermsWarps +
                    threadIdx.x / 32;
       at < end; at += stride) {
    const int block = static_cast<int>(at >> 2 * log2_parts);
    const int part_row = at >> log2_parts & (parts - 1), part_column = at & (parts - 1);
    const int granule_row = row % kGranules, granule_column = lists.c.col[block] % kGranules;
    const int64_t first = lists.first[block], last = lists.first[block + 1];
    // The numbers of a product's blocks of A and B, at `part` of its K.
    const auto number_a = [&](int64_t product, int part) {
      const int slot = lists.slots_a[product];
      const int row_a = kGranules == 1 ? (slot << log2_parts) + part_row : lists.cells_a[slot];
      return (int64_t{row_a} << log2_parts) + part;
    };
    const auto number_b = [&](int64_t product, int part) {
      const int slot = lists.slots_b[product];
      const int row_b = kGranules == 1 ? (slot << log2_parts) + part : lists.cells_b[slot];
      return int64_t{part_column} * p.b.depth + row_b;
    };
    const auto granule_k = [&](int64_t product) {
      return lists.col_a[lists.slots_a[product]] % kGranules;
    };
    int kinds_a = 0, kinds_b = 0;
    for (int64_t i = (first << log2_parts) + lane; i < last << log2_parts; i += 32) {
      const int64_t product = i >> log2_parts;
      const int part = i & (parts - 1), k = granule_k(product);
      kinds_a |= p.a.template header<kGranules>(number_a(product, part)).kinds(granule_row, k);
      kinds_b |= p.b.template header<kGranules>(number_b(product, part)).kinds(granule_column, k);
    }
    const auto any = [](int kinds, int kind) { return __any_sync(~0u, (kinds & kind) != 0); };
    const bool any_a = any(kinds_a, kSplitFaint) && any(kinds_b, kSplitWide);
    const bool any_b = any(kinds_b, kSplitFaint) && any(kinds_a, kSplitWide);
    const int64_t cell = kGranules == 1 ? at : lists.cells_c[block];
    int16_t& term = p.terms[(cell * kGranules + granule_row) * kGranules + granule_column];
    if (!any_a && !any_b) {
      const bool special = any(kinds_a | kinds_b, kSplitSpecial);
      if (lane == 0) term = special ? kNoTerms : kPlainTerms;
      continue;
    }

    constexpr int kNone = -0x8000;
    int largest = kNone;
    for (int64_t i = first << log2_parts; i < last << log2_parts; ++i) {
      const int64_t product = i >> log2_parts;
      const int part = i & (parts - 1), k = granule_k(product);
      const int64_t a = number_a(product, part), b = number_b(product, part);
      const auto& below_a = p.a.template profile<kGranules>(a).below[granule_row];
      const auto& below_b = p.b.template profile<kGranules>(b).below[granule_column];
      int least = 2 * kNothingAtK;
      constexpr int kDepth = kSplitBlock / kGranules;
#pragma unroll
      for (int d = lane; d < kDepth; d += 32)
        least = min(least, below_a[k * kDepth + d] + below_b[k * kDepth + d]);
      least = __reduce_min_sync(~0u, least);
      const int top = p.a.template header<kGranules>(a).exponent(granule_row, k) +
                      p.b.template header<kGranules>(b).exponent(granule_column, k);
      if (least < kNothingAtK) largest = max(largest, top + 2 * kSplitBits - least);
    }
    if (lane != 0) continue;
    term = largest == kNone
               ? kNoTerms
               : static_cast<int16_t>(max(largest, least_term(p.product.tau.value(), p.margin)));
  }
}

template <int kGranules>
cudaError_t launch_listed_terms(const LargestTermsParams& p, const ProductLists& lists,
                                cudaStream_t stream) {
  constexpr int kTogether = 8;  // thread blocks of a block row
  return launch(find_listed_terms<kGranules>, dim3(lists.c.rows, kTogether), kTermsThreads, 0,
                /*overlap_previous=*/false, stream, p, lists);
}

}  // namespace spamm::kernels
