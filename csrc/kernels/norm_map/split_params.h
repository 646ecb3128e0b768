// A float32 operand split into split parts, for products on tensor cores.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/norm_map/params.h"

namespace spamm::kernels {

constexpr int kSplitBlock = 64;  // lines of a block, and entries of a line

// A block x as 2^exponent * (high + low), or as 2^exponent * high alone: in lines of 128 bytes,
// 16-byte chunks permuted as by TMA's 128-byte swizzle, zeros where the matrix has ended.
template <int kSplitParts>
struct alignas(128) SplitBlock {
  uint8_t parts[kSplitParts][kSplitBlock * 128];
};

// What split.cuh says of a block: flags.
enum SplitKind : uint8_t {
  kSplitWide = 1,     // magnitudes differ much along K
  kSplitFaint = 2,    // so much that some k lose digits
  kSplitSpecial = 4,  // infinities or NaN: split parts do not hold it
  kSplitZero = 8      // nothing but zeros
};

// What else must be known of a block; copied in bulk, hence its size.
struct alignas(16) SplitHeader {
  const float* source;  // the block in the operand itself
  int16_t exponent;
  uint8_t kinds;
  uint8_t lines, length;  // of the block in the matrix, 1 to 64
};

// Block (batch, i, k) is number (batch * extent + i) * depth + k, i counting blocks of M or N.
struct SplitOperand {
  void* blocks;  // of the SplitBlock of so many split parts
  SplitHeader* headers;
  int extent, depth;  // in blocks
};

struct SplitParams {
  NormMapParams<float> matrix;  // in blocks of 64 x 64; norms may be null
  SplitOperand split;
  bool lines_along_k;  // a line's entries are neighbours along K
  int* zeroed;         // set to zero, if not null
};

// An operand of the multiply: its split parts, and the steps between neighbours of M
// or N, and of K, in the original.
struct SplitSource {
  SplitOperand split;
  int64_t extent_stride, k_stride;
};

constexpr int64_t split_bytes_per_block(int split_parts) {
  return split_parts * static_cast<int64_t>(sizeof(SplitBlock<1>)) + sizeof(SplitHeader);
}

}  // namespace spamm::kernels
