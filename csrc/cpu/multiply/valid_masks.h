// The valid products of a tile of C as bit masks.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/common/machine.h"

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

}  // namespace spamm::cpu
