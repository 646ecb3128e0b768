// Blocks: the tiles of a norm map.
#pragma once

#include <bit>
#include <cstdint>

namespace spamm {

// (m, k, n): edges of the blocks of A (m x k), B (k x n) and C (m x n).
struct Block {
  int64_t m, k, n;
};

inline bool is_block_edge(int64_t edge) { return edge == 32 || edge == 64 || edge == 128; }

// The number of blocks along a length. The last one may stick out.
inline int64_t blocks_of(int64_t length, int64_t edge) { return (length + edge - 1) / edge; }

// `power` is a power of two.
inline int log2_of(int64_t power) { return std::countr_zero(static_cast<uint64_t>(power)); }

}  // namespace spamm
