// The sizes of the terms that make up a granule of C = A B, for operands in split parts: the
// largest product a[i, k] * b[k, j] in it, over all k of its valid block products, as a power of
// two. The multiply compares with it what split parts lose (multiply/sm90/split/stage.cuh): digits
// that are small beside the terms of the whole sum need no exact product.
//
// A product of matrices in which + is max and * is +, over the profiles of the granules. Products
// that are skipped do not count. So the number depends on tau and on what the sum of this granule
// is made of, and on nothing else: not on other granules of a tile, and not on memory that no valid
// product reads.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/common/launch.cuh"
#include "kernels/common/overlap.cuh"
#include "kernels/common/skip_test.cuh"
#include "kernels/multiply/params.h"
#include "kernels/norm_map/params.h"

namespace spamm::kernels {

struct LargestTermsParams {
  MultiplyParams<float> product;
  SplitOperand a, b;
  bool a_has_batch, b_has_batch;  // false: all batches share the operand
  int16_t* terms;                 // (batch, granules along M, granules along N), of whole blocks
  int margin;                     // terms below 2^margin * tau count as that
};

constexpr int kTermsEdge = 8;   // granules of C along an edge of a thread block
constexpr int kTermsWarps = 8;  // which take the blocks along K in turns
constexpr int kTermsThreads = 32 * kTermsWarps;
constexpr int kOwnTerms = kTermsEdge * kTermsEdge / 32;  // granules of C of each lane, in a row
constexpr int16_t kNoTerms = 0x7fff;                     // all terms are 0
constexpr int16_t kPlainTerms = -0x8000;                 // no product of the tile needs_exact()

// The number that counts as a largest term where all terms are smaller, for a product of `margin`.
__device__ __forceinline__ int least_term(float tau, int margin) {
  constexpr int kBeyondAll = 300;
  return tau > 0 ? min(max(ilogbf(tau), -kBeyondAll), kBeyondAll) + margin : -kBeyondAll;
}

// The lines of one operand that a thread block works on: granules along M (or N).
template <int kGranules>
class TermsLines {
  static constexpr int kDepth = kSplitBlock / kGranules;

 public:
  // `norm_step` and `norm_k_step` are the strides of `norms` from block to block along M (or N) and
  // along K; `norm_lines` is the number of blocks along M (or N).
  __device__ TermsLines(const SplitOperand& operand, int64_t batch, int first, const float* norms,
                        int log2_block, int norm_lines, int64_t norm_step, int64_t norm_k_step)
      : operand_(operand),
        before_(batch * operand.extent),
        first_(first),
        norms_(norms),
        log2_block_(log2_block),
        norm_lines_(norm_lines),
        norm_step_(norm_step),
        norm_k_step_(norm_k_step) {}

  __device__ const SplitHeaderOf<kGranules>& header(int line, int k) const {
    return operand_.template header<kGranules>(number(line, k));
  }
  __device__ int exponent(int line, int k, int part) const {
    return header(line, k).exponent(clamped(line) % kGranules, part);
  }
  // Part `word` of the profile of a line in the k-th block along K.
  __device__ uint4 profile(int line, int k, int word) const {
    const auto& profile = operand_.template profile<kGranules>(number(line, k));
    return reinterpret_cast<const uint4*>(profile.below[clamped(line) % kGranules])[word];
  }
  // `norm_k` is a block of the norm map along K.
  __device__ float norm(int line, int norm_k) const {
    const int row = min(clamped(line) * kDepth >> log2_block_, norm_lines_ - 1);
    return norms_[row * norm_step_ + norm_k * norm_k_step_];
  }

 private:
  __device__ int clamped(int line) const {
    return min(first_ + line, operand_.extent * kGranules - 1);
  }
  __device__ int64_t number(int line, int k) const {
    return (before_ + clamped(line) / kGranules) * operand_.depth + k;
  }

  const SplitOperand& operand_;
  int64_t before_;
  int first_;
  const float* norms_;
  int log2_block_, norm_lines_;
  int64_t norm_step_, norm_k_step_;
};

// The flags that a thread finds in its share of the granules of these lines.
template <int kGranules>
__device__ int find_kinds(const TermsLines<kGranules>& lines, int depth) {
  int kinds = 0;
#pragma unroll 4
  for (int i = threadIdx.x; i < kTermsEdge * depth; i += kTermsThreads) {
    const auto& header = lines.header(i / depth, i % depth);
#pragma unroll
    for (const uint8_t flags : header.flags) kinds |= flags;
  }
  return kinds;
}

// The products of a granule of A and one of B that may need an exact product (needs_exact()).
struct TileKinds {
  bool special;    // some do whatever the largest term is
  bool ask_terms;  // some may, by the largest term
};

// The thread block calls it together.
template <int kGranules>
__device__ TileKinds find_tile_kinds(const TermsLines<kGranules>& a, const TermsLines<kGranules>& b,
                                     int depth) {
  const int kinds_a = find_kinds(a, depth), kinds_b = find_kinds(b, depth);
  const auto any = [](int kinds) { return __syncthreads_or(kinds) != 0; };
  const int kinds = kinds_a | kinds_b;
  if (!any(kinds & (kSplitFaint | kSplitSpecial))) return {};
  return {any(kinds & kSplitSpecial),
          (any(kinds_a & kSplitFaint) && any(kinds_b & kSplitWide)) ||
              (any(kinds_b & kSplitFaint) && any(kinds_a & kSplitWide))};
}

// The facts of a block along K that a lane needs.
template <int kGranules>
struct TermsStep {
  static constexpr int kWords = kSplitBlock / 8;  // of a line; each holds eight neighbouring k
  static constexpr int kLoads = 2 * kTermsEdge * kWords / 32;

  uint4 profiles[kLoads];
  int tops[kOwnTerms][kGranules];
  bool valid[kOwnTerms][kGranules];
};

// The profiles of a block along K: the lines of A, then those of B. The pad puts the lines into
// different banks.
using TermsProfiles = uint4[2 * kTermsEdge][kSplitBlock / 8 + 1];

// The largest terms of a tile of kTermsEdge x kTermsEdge granules of C. Each warp finds those of
// its blocks along K.
template <int kGranules>
__global__ void __launch_bounds__(kTermsThreads)
    find_largest_terms(const __grid_constant__ LargestTermsParams p) {
  using Step = TermsStep<kGranules>;
  constexpr int kGranuleWords = Step::kWords / kGranules, kDepth = kSplitBlock / kGranules;
  constexpr int kOfARow = kTermsEdge / kOwnTerms;  // lanes
  __shared__ TermsProfiles profiles[kTermsWarps];
  __shared__ int found[kTermsWarps][kTermsEdge * kTermsEdge];
  let_next_kernel_start();
  wait_for_previous_kernel();

  const MultiplyParams<float>& product = p.product;
  const int rows = p.a.extent * kGranules, columns = p.b.extent * kGranules, depth = p.a.depth;
  const int tile_rows = (rows - 1) / kTermsEdge + 1, tile_columns = (columns - 1) / kTermsEdge + 1;
  const int first_column = blockIdx.x % tile_columns * kTermsEdge;
  const int first_row = blockIdx.x / tile_columns % tile_rows * kTermsEdge;
  const int64_t batch = blockIdx.x / tile_columns / tile_rows;
  const auto blocks = [](int64_t size, int log2_block) {
    return static_cast<int>(((size - 1) >> log2_block) + 1);
  };
  const int norm_rows = blocks(product.m, product.log2_block_m);
  const int norm_columns = blocks(product.n, product.log2_block_n);
  const int norm_depth = blocks(product.k, product.log2_block_k);
  const TermsLines<kGranules> a(p.a, p.a_has_batch ? batch : 0, first_row,
                                product.norm_a + batch * norm_rows * norm_depth,
                                product.log2_block_m, norm_rows, norm_depth, 1);
  const TermsLines<kGranules> b(p.b, p.b_has_batch ? batch : 0, first_column,
                                product.norm_b + batch * norm_depth * norm_columns,
                                product.log2_block_n, norm_columns, 1, norm_columns);
  const int own_row = first_row + threadIdx.x / kTermsEdge;
  const int own_column = first_column + threadIdx.x % kTermsEdge;
  const auto write = [&](int term) {
    p.terms[(batch * rows + own_row) * columns + own_column] = static_cast<int16_t>(term);
  };
  const bool writes =
      threadIdx.x < kTermsEdge * kTermsEdge && own_row < rows && own_column < columns;
  const TileKinds kinds = find_tile_kinds(a, b, depth);
  if (!kinds.ask_terms) {
    if (writes) write(kinds.special ? kNoTerms : kPlainTerms);
    return;
  }

  const float tau = product.tau.value();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int row = lane / kOfARow, column = lane % kOfARow * kOwnTerms;
  const auto load = [&](int k) {
    Step step;
#pragma unroll
    for (int i = 0; i < Step::kLoads; ++i) {
      const int line = (i * 32 + lane) / Step::kWords, word = lane % Step::kWords;
      step.profiles[i] =
          line < kTermsEdge ? a.profile(line, k, word) : b.profile(line - kTermsEdge, k, word);
    }
#pragma unroll
    for (int part = 0; part < kGranules; ++part) {
      const int norm_k =
          min((k * kSplitBlock + part * kDepth) >> product.log2_block_k, norm_depth - 1);
      const float norm_a = a.norm(row, norm_k);
      const int top_a = a.exponent(row, k, part) + 2 * kSplitBits;
#pragma unroll
      for (int i = 0; i < kOwnTerms; ++i) {
        step.valid[i][part] = is_valid(norm_product(norm_a, b.norm(column + i, norm_k)), tau);
        step.tops[i][part] = top_a + b.exponent(column + i, k, part);
      }
    }
    return step;
  };
  constexpr int kNone = -0x8000;
  int largest[kOwnTerms];
#pragma unroll
  for (int& term : largest) term = kNone;
  TermsProfiles& below = profiles[warp];
#pragma unroll 1
  for (int k = warp; k < depth; k += kTermsWarps) {
    const Step step = load(k);
#pragma unroll
    for (int i = 0; i < Step::kLoads; ++i) {
      below[(i * 32 + lane) / Step::kWords][lane % Step::kWords] = step.profiles[i];
    }
    __syncwarp();
#pragma unroll
    for (int part = 0; part < kGranules; ++part) {
      uint32_t least[kOwnTerms];  // of two neighbouring k each
#pragma unroll
      for (uint32_t& pair : least) pair = 0xffffffff;
#pragma unroll
      for (int word = part * kGranuleWords; word < (part + 1) * kGranuleWords; ++word) {
        const uint4 x = below[row][word];
#pragma unroll
        for (int i = 0; i < kOwnTerms; ++i) {
          const uint4 y = below[kTermsEdge + column + i][word];
          least[i] = __viaddmin_u16x2(x.x, y.x, least[i]);
          least[i] = __viaddmin_u16x2(x.y, y.y, least[i]);
          least[i] = __viaddmin_u16x2(x.z, y.z, least[i]);
          least[i] = __viaddmin_u16x2(x.w, y.w, least[i]);
        }
      }
#pragma unroll
      for (int i = 0; i < kOwnTerms; ++i) {
        const int all = min(least[i] & 0xffff, least[i] >> 16);
        if (step.valid[i][part] && all < kNothingAtK) {
          largest[i] = max(largest[i], step.tops[i][part] - all);
        }
      }
    }
    __syncwarp();
  }
#pragma unroll
  for (int i = 0; i < kOwnTerms; ++i) found[warp][row * kTermsEdge + column + i] = largest[i];
  __syncthreads();
  if (writes) {
    int most = kNone;
#pragma unroll
    for (int i = 0; i < kTermsWarps; ++i) most = max(most, found[i][threadIdx.x]);
    write(most == kNone ? kNoTerms : max(most, least_term(tau, p.margin)));
  }
}

// kGranules: along each edge of a split block.
template <int kGranules>
cudaError_t launch_largest_terms(const LargestTermsParams& p, cudaStream_t stream) {
  const auto tiles = [](int extent) {
    return static_cast<int64_t>((extent * kGranules - 1) / kTermsEdge + 1);
  };
  const auto grid = static_cast<unsigned>(tiles(p.a.extent) * tiles(p.b.extent) * p.product.batch);
  return launch(find_largest_terms<kGranules>, grid, kTermsThreads, 0, /*overlap_previous=*/true,
                stream, p);
}

// ---- Listed products ---------------------------------------------------------------------------

// A warp computes the terms of one block of C, or of one part of a block of 128.
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
