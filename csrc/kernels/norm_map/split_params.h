// A float32 operand in split parts, for products on tensor cores.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/norm_map/params.h"

namespace spamm::kernels {

constexpr int kSplitBlock = 64;  // lines of a block, and entries of each line

// The split parts of a block. Each part has 64 lines of 128 bytes in TMA's 128-byte swizzle, with
// zeros beyond the edges of the matrix.
template <int kSplitParts>
struct alignas(128) SplitBlock {
  uint8_t parts[kSplitParts][kSplitBlock * 128];
};

// Flags of a block, set by split.cuh.
enum SplitKind : uint8_t {
  kSplitWide = 1,     // magnitudes differ much along K
  kSplitFaint = 2,    // they differ so much that the entries of some k lose digits
  kSplitSpecial = 4,  // has infinities or NaNs, which split parts cannot represent
  kSplitZero = 8      // holds only zeros
};

// What the multiply needs to know about a block besides its split parts. 16 bytes, because it is
// fetched by a bulk copy.
struct alignas(16) SplitHeader {
  const float* source;  // the block in the original operand
  int16_t exponent;
  uint8_t kinds;
  uint8_t lines, length;  // the part of the block inside the matrix, 1 to 64
};

// For each k of a block, how many powers of two its largest entry lies below the block's bound
// 2^(exponent + kSplitBits). kNothingAtK where all its entries are 0.
struct alignas(16) SplitProfile {
  uint16_t below[kSplitBlock];
};

constexpr int kSplitBits = 14;  // the largest scaled entry of a block is below 2^(kSplitBits + 1)
constexpr uint16_t kNothingAtK = 0x4000;  // the sum of two of them still fits

// Block (batch, i, k) has number (batch * extent + i) * depth + k, where i counts blocks of M or N.
struct SplitOperand {
  void* blocks;  // an array of SplitBlock<1> or SplitBlock<2>
  SplitHeader* headers;
  SplitProfile* profiles;  // null: they are not computed
  int extent, depth;       // blocks along M (or N), and along K
};

struct SplitParams {
  NormMapParams<float> matrix;  // in blocks of 64 x 64; norms may be null
  SplitOperand split;
  bool lines_along_k;  // the entries of a line are neighbours along K
  int* zeroed;         // the kernel sets it to 0; may be null
};

// An operand of the multiply: its split parts, and the strides of the original operand along M (or
// N) and along K.
struct SplitSource {
  SplitOperand split;
  int64_t extent_stride, k_stride;
};

// See largest_terms.cuh.
struct LargestTermsParams {
  SplitOperand a, b;
  bool a_has_batch, b_has_batch;  // false: all batches share the operand
  int16_t* terms;                 // (batch, a.extent, b.extent)
};

constexpr int64_t split_bytes_per_block(int split_parts) {
  return split_parts * static_cast<int64_t>(sizeof(SplitBlock<1>)) + sizeof(SplitHeader) +
         sizeof(SplitProfile);
}

}  // namespace spamm::kernels
