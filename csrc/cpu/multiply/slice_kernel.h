// The products of blocks in one slice of K: how B is packed, and how a run of neighbouring valid
// blocks is multiplied. Dense and block-sparse products share it, so that both have the same bits.
#pragma once

#include <c10/util/hash.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstdint>

#include "block.h"
#include "cpu/common/convert.h"
#include "cpu/common/machine.h"
#include "cpu/multiply/microkernel.h"
#include "cpu/multiply/panels.h"

namespace spamm::cpu {

// Blocks begin, begin + 1, ...
struct Range {
  int64_t begin, size;

  int64_t end() const { return begin + size; }
};

// Norm maps of one product, (MB, KB) and (KB, NB), and the threshold.
template <class N>
struct Norms {
  const N *a, *b;
  int64_t kb, nb;
  N tau;
};

constexpr int64_t kMaskBits = 64;

// Bit k of masks[i * j.size + j] is set if product (i, k, j) is valid. The indices count from the
// beginning of the ranges. Range `k` has at most kMaskBits blocks.
template <class N>
SPAMM_CPU_CLONES static void find_valid(const Norms<N>& norms, Range i, Range k, Range j,
                                        uint64_t* __restrict masks) {
  std::fill_n(masks, i.size * j.size, 0);
  for (int64_t row = 0; row < i.size; ++row, masks += j.size) {
    const N* norm_a = norms.a + (i.begin + row) * norms.kb + k.begin;
    for (int64_t depth = 0; depth < k.size; ++depth) {
      const N* norm_b = norms.b + (k.begin + depth) * norms.nb + j.begin;
      for (int64_t column = 0; column < j.size; ++column) {
        const bool is_valid = !(norm_a[depth] * norm_b[column] < norms.tau);
        masks[column] |= static_cast<uint64_t>(is_valid) << depth;
      }
    }
  }
}

// Clears the masks of blocks below the diagonal of C.
inline void clear_lower(Range i, Range j, uint64_t* masks) {
  for (int64_t row = 0; row < i.size; ++row) {
    const int64_t lower = std::clamp<int64_t>(i.begin + row - j.begin, 0, j.size);
    std::fill_n(masks + row * j.size, lower, 0);
  }
}

// Matrix instructions: brgemm generates a kernel for each combination of sizes and strides and
// keeps it for the life of the thread. A program whose sizes change from call to call would fill
// its memory with kernels. Therefore only the first shapes in a process are multiplied without a
// copy. All others are copied and padded, so that few sizes and strides occur.
constexpr int64_t kDepthStep = 32;  // padded sizes of K and of rows are multiples of these
constexpr int64_t kRowsStep = 16;

inline int64_t round_up(int64_t size, int64_t step) { return (size + step - 1) / step * step; }

// Small numbers are rounded to a power of two: a product of one row should not cost sixteen.
inline int64_t rounded_rows(int64_t rows) {
  return rows < kRowsStep ? static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(rows)))
                          : round_up(rows, kRowsStep);
}

// Tells whether the shape described by `values` is among the first in this process. The answer for
// a shape never changes. Shapes with the same hash are one; at worst brgemm makes one more kernel.
template <class... Values>
bool is_early_shape(const Values&... values) {
  constexpr int kMost = 32;
  static std::array<std::atomic<size_t>, kMost> met{};
  const size_t shape = c10::get_hash(values...) | 1;  // never zero, which marks a free place
  for (auto& place : met) {
    size_t known = place.load(std::memory_order_relaxed);
    if (known == 0 && place.compare_exchange_strong(known, shape, std::memory_order_relaxed)) {
      return true;
    }
    if (known == shape) return true;
  }
  return false;
}

constexpr int64_t kSliceDepth = 512;  // K of a slice
constexpr int64_t kPieceDepth = 128;  // K of one sum: the error is below torch.mm's; 2% slower
constexpr int64_t kPanelWidth = 64;   // the widest panel that matrix instructions support
constexpr int64_t kMostRows = 128;    // of a block
constexpr int64_t kVectorBytes = 64;  // the least width of other panels; two in a row, or three

// Calls visit(run) for each run of neighbouring bits of a mask.
template <class Visit>
void each_run(uint64_t mask, const Visit& visit) {
  while (mask) {
    const int begin = std::countr_zero(mask);
    const int size = std::countr_one(mask >> begin);
    mask &= begin + size == kMaskBits ? 0 : ~uint64_t{0} << (begin + size);
    visit(Range{begin, size});
  }
}

// Rows of A from some element on, `stride` apart; or its columns.
template <class P>
struct RowsOfA {
  const P* data;
  int64_t stride;
  bool by_columns = false;
};

// T: type of the operands. P: type of the packed panels.
template <class T, class P>
struct SliceKernel {
  using Sum = typename Microkernel<P>::Sum;
  static constexpr bool kVnni = Microkernel<P>::kVnni;
  // For half types, rounding the result loses more than a long sum.
  static constexpr int64_t kPiece = sizeof(T) == 2 ? kSliceDepth : kPieceDepth;

  static constexpr int64_t kLanes = kVectorBytes / sizeof(P);

  Block block;
  int64_t depth = kSliceDepth;  // of a panel, at most

  // The width of the next part of a panel, where so many columns are left: whole vectors for matrix
  // instructions, else no less than one.
  int64_t width(int64_t columns) const {
    if (kVnni) return std::min(kPanelWidth, round_up(columns, kDepthStep));
    return columns > 3 * kLanes ? 2 * kLanes : std::max(columns, kLanes);
  }
  int64_t panel_size() const { return depth * block.n; }

  // Copies a block of B to its place in a panel, [n / width][K][width]: blocks before it in the
  // slice are `before`. The last columns may be narrower.
  void pack(const View<T>& from, int64_t before, P* panel) const {
    for (int64_t c = 0, width; c < from.columns; c += width) {
      width = this->width(from.columns - c);
      P* target = panel + c * this->depth + before * block.k * width;
      const View<T> part = from.block(0, c, from.rows, width);
      if constexpr (kVnni) {
        copy_vnni(part, target, width);
        // Zeros up to the padded K. The layout already fills a pair of rows.
        std::fill(target + round_up(part.rows, 2) * width,
                  target + round_up(part.rows, kDepthStep) * width, P(0));
      } else {
        copy_rows(part, target, width, width);
      }
    }
  }

  // sums = or, with `add`, += rows of A (rows x depth) times `columns` columns of B, whose rows are
  // contiguous.
  void multiply(const RowsOfA<P>& a, int64_t rows, int64_t depth, const P* b, int64_t ldb,
                int64_t columns, Sum* sums, int64_t ld_sums, bool add) const {
    for (int64_t d = 0; d < depth; d += kPiece) {
      Microkernel<P>::multiply(rows, columns, std::min(kPiece, depth - d),
                               a.data + d * (a.by_columns ? a.stride : 1), a.stride, a.by_columns,
                               b + d * ldb, ldb, sums, ld_sums, add || d > 0);
    }
  }

  // The same with the blocks of a panel from block `first` on.
  void multiply_panel(const RowsOfA<P>& a, int64_t rows, int64_t depth, const P* panel,
                      int64_t first, int64_t columns, Sum* sums, int64_t ld_sums, bool add) const {
    for (int64_t c = 0, width; c < columns; c += width) {
      width = this->width(columns - c);
      const P* const b = panel + c * this->depth + first * block.k * width;
      if (kVnni || width <= columns - c) {
        multiply(a, rows, depth, b, width, width, sums + c, ld_sums, add);
      } else {  // less than a vector
        Sum padded[kMostRows * kLanes] = {};
        for (int64_t r = 0; add && r < rows; ++r)
          std::copy_n(sums + r * ld_sums + c, columns - c, padded + r * width);
        multiply(a, rows, depth, b, width, width, padded, width, add);
        for (int64_t r = 0; r < rows; ++r)
          std::copy_n(padded + r * width, columns - c, sums + r * ld_sums + c);
      }
    }
  }
};

// Writes some rows and columns of C. `sums` is null if no product was valid; `input` may be null.
// Both may be the very elements that are written.
template <class T, class Sum>
SPAMM_CPU_CLONES static void write_rows(const Sum* sums, int64_t ld_sums, Sum alpha,
                                        const View<T>* input, Sum beta, T* out, int64_t ld_out,
                                        int64_t rows, int64_t columns) {
  const auto fill = [&](const auto& element) {
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t c = 0; c < columns; ++c) out[r * ld_out + c] = narrow<T>(element(r, c));
  };
  const auto product = [&](int64_t r, int64_t c) { return alpha * sums[r * ld_sums + c]; };
  const auto addend = [&](int64_t r, int64_t c) {
    const T value = input->data[r * input->row_stride + c * input->column_stride];
    return beta * static_cast<Sum>(widen(value));
  };
  if (sums && input) {
    fill([&](int64_t r, int64_t c) { return product(r, c) + addend(r, c); });
  } else if (sums) {
    fill(product);
  } else if (input) {
    fill(addend);
  } else {
    fill([](int64_t, int64_t) { return Sum(0); });
  }
}

}  // namespace spamm::cpu
