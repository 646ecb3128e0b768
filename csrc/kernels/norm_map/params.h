// The parameters of the norm kernel. Lines are the contiguous dimension of a matrix: the rows of a
// row-major one, the columns of a column-major one.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace spamm::kernels {

constexpr int kLog2NormThreads = 8,
              kNormThreads = 1 << kLog2NormThreads;  // of a thread block, at most

template <class Norm>
struct NormMapParams {
  const void* data;
  int64_t batch, lines, length;                     // length: entries of a line
  int64_t batch_stride, line_stride, entry_stride;  // in elements
  int log2_block_lines, log2_block_length;
  bool vector;  // whether address and strides allow loads of 16 bytes along the lines
  Norm* norms;  // may be null in a launch that copies
  int64_t norm_batch_stride, norm_line_stride, norm_entry_stride;
  // The place that the lines are copied to, if not null. Its address and strides, in entries, are
  // multiples of 16 bytes; a line ends in zeros up to such a multiple.
  void* copy;
  int64_t copy_batch_stride, copy_line_stride;
};

// ---- Split parts of float32 operands, for products on tensor cores ------------------------------

constexpr int kSplitBlock = 64;  // lines of a block, and entries of each line

// The split parts of a block. Each part has 64 lines of 128 bytes in TMA's 128-byte swizzle, with
// zeros beyond the edges of the matrix. Lines are its rows, however the matrix lies in memory.
template <int kSplitParts>
struct alignas(128) SplitBlock {
  uint8_t parts[kSplitParts][kSplitBlock * 128];
};

// Flags of a granule, set by split.cuh.
enum SplitKind : uint8_t {
  kSplitWide = 1,     // magnitudes differ much along K, or some k holds only zeros
  kSplitFaint = 2,    // they differ so much that the entries of some k lose digits
  kSplitSpecial = 4,  // has infinities or NaNs, which split parts cannot represent
  kSplitZero = 8,     // holds only zeros
  kSplitTiny = 16     // the largest entry of some k lies below 2^-110, and is not 0
};

// The facts of a block that the multiply needs besides its split parts. A multiple of 16 bytes,
// because it is fetched by a bulk copy.
//
// A block has kGranules x kGranules granules. Each has a power of two and flags of its own, so that
// it does not depend on its neighbours. `extent` counts granules along M (or N), `k` along K.
template <int kGranules_>
struct alignas(16) SplitHeaderOf {
  static constexpr int kGranules = kGranules_;

  const float* source;  // the block in the original operand
  int16_t exponents[kGranules * kGranules];
  uint8_t flags[kGranules * kGranules];
  uint8_t extent, depth;  // the part of the block inside the matrix, 1 to 64

  static constexpr __host__ __device__ int number(int extent, int k) {
    return extent * kGranules + k;
  }
  __device__ int exponent(int extent = 0, int k = 0) const { return exponents[number(extent, k)]; }
  __device__ int kinds(int extent = 0, int k = 0) const { return flags[number(extent, k)]; }
};
using SplitHeader = SplitHeaderOf<1>;

// For each k of a block, how many powers of two the largest entry of a granule lies below the
// granule's bound 2^(exponent + kSplitBits). kNothingAtK where all its entries are 0.
template <int kGranules>
struct alignas(16) SplitProfile {
  uint16_t below[kGranules][kSplitBlock];  // granules along M (or N)
};

// With longer strides, in entries, distances within a block would not fit an int.
constexpr int64_t kLongestSplitStride = 0x7fffffff / (2 * kSplitBlock);

constexpr int kSplitBits = 14;  // the largest scaled entry of a granule is below 2^(kSplitBits + 1)
constexpr uint16_t kNothingAtK = 0x4000;  // the sum of two of them still fits

// Block (batch, i, k) has number (batch * extent + i) * depth + k, where i counts blocks of M or N.
struct SplitOperand {
  void* blocks;       // an array of SplitBlock<1> or SplitBlock<2>
  void* headers;      // an array of SplitHeaderOf<kGranules>
  void* profiles;     // an array of SplitProfile<kGranules>
  int extent, depth;  // blocks along M (or N), and along K

  template <int kGranules>
  __host__ __device__ SplitHeaderOf<kGranules>& header(int64_t number) const {
    return static_cast<SplitHeaderOf<kGranules>*>(headers)[number];
  }
  template <int kGranules>
  __host__ __device__ SplitProfile<kGranules>& profile(int64_t number) const {
    return static_cast<SplitProfile<kGranules>*>(profiles)[number];
  }
};

struct SplitParams {
  NormMapParams<float> matrix;  // in blocks of a granule; norms may be null
  SplitOperand split;
  bool lines_along_k;  // the entries of a line are neighbours along K
  bool turned;         // the lines are columns of the matrix
  int* zeroed;         // the kernel sets it to 0; may be null
};

// An operand of the multiply: its split parts, and the strides of the original operand along M (or
// N) and along K.
struct SplitSource {
  SplitOperand split;
  int64_t extent_stride, k_stride;
};

}  // namespace spamm::kernels
