// The products of blocks in one slice of K: how B is packed, and how a run of neighbouring valid
// blocks is multiplied. Dense and block-sparse products share it, so that both have the same bits.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include "block.h"
#include "cpu/multiply/kernel_shapes.h"
#include "cpu/multiply/microkernel.h"
#include "cpu/multiply/panels.h"
#include "cpu/multiply/valid_masks.h"

namespace spamm::cpu {

constexpr int64_t kSliceDepth = 512;  // K of a slice
constexpr int64_t kPieceDepth = 128;  // K of one sum: the error is below torch.mm's; 2% slower
constexpr int64_t kPanelWidth = 64;   // the widest panel that matrix instructions support

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

// T: type of the operands. P: type of the packed panels.
template <class T, class P>
struct SliceKernel {
  using Sum = typename Microkernel<P>::Sum;
  static constexpr bool kVnni = Microkernel<P>::kVnni;
  // For half types, rounding the result loses more than a long sum.
  static constexpr int64_t kPiece = sizeof(T) == 2 ? kSliceDepth : kPieceDepth;

  Block block;

  int64_t width() const { return std::min(block.n, kPanelWidth); }
  int64_t panel_size() const { return kSliceDepth * block.n; }

  // Copies a block of B to its place in a panel, [n / width][K][width]: blocks before it in the
  // slice are `depth`.
  void pack(const View<T>& from, int64_t depth, P* panel) const {
    const int64_t width = this->width();
    for (int64_t c = 0; c < from.columns; c += width) {
      P* target = panel + c * kSliceDepth + depth * block.k * width;
      const View<T> part = from.block(0, c, from.rows, width);
      if constexpr (kVnni) {
        copy_vnni(part, target, width);
      } else {
        copy_rows(part, target, width, width);
      }
      // Zeros up to the padded K. VNNI layout already fills a pair of rows.
      const int64_t copied = kVnni ? round_up(part.rows, 2) : part.rows;
      std::fill(target + copied * width, target + round_up(part.rows, kDepthStep) * width, P(0));
    }
  }

  // sums = or, with `add`, += rows of A (rows x depth) times the blocks of a panel from block
  // `first` on.
  void multiply(const P* a, int64_t lda, int64_t rows, int64_t depth, const P* panel, int64_t first,
                int64_t columns, Sum* sums, bool add) const {
    const int64_t width = this->width();
    for (int64_t c = 0; c < columns; c += width) {
      const P* b = panel + c * kSliceDepth + first * block.k * width;
      for (int64_t d = 0; d < depth; d += kPiece) {
        Microkernel<P>::multiply(rows, width, std::min(kPiece, depth - d), a + d, lda,
                                 b + d * width, width, sums + c, block.n, add || d > 0);
      }
    }
  }
};

}  // namespace spamm::cpu
