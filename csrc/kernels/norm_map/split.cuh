// Cuts float32 blocks of 64 x 64 into split parts for multiply/sm90/split/multiply.cuh, and
// computes their norms in the same pass, with the same bits as norm_map.cuh.
//
// A granule is x = 2^exponent * (high + low), or x = 2^exponent * high. Here a block is one
// granule; split_granules.cuh has four in a block. Products of two granules that would lose
// accuracy are multiplied without split parts; the flags of SplitKind mark such granules. Error
// analysis: docs/kernels/multiply.md (two split parts), docs/kernels/norm_map.md (one). One
// launch serves both operands.
#pragma once

#include "kernels/norm_map/norm_map.cuh"
#include "kernels/norm_map/params.h"

namespace spamm::kernels {

constexpr int kSplitThreads = norm_threads<float>(12);  // for one block
constexpr int kSplitGroups = kNormThreads / kSplitThreads;
constexpr int kSplitLineChunks = kSplitBlock / 4, kSplitChunks = kSplitBlock * kSplitLineChunks;
constexpr int kSplitLoads = kSplitChunks / kSplitThreads;
static_assert(kSplitLoads <= kChunks && kSplitThreads % kSplitLineChunks == 0);

// Exponents are multiples of kStep. A granule is wide if for some k all scaled entries are below
// 2^kWide, and faint if for some k all are below 2^kFaint, but not all 0.
template <int kSplitParts>
struct SplitRule {
  static constexpr int kStep = kSplitParts == 1 ? 4 : 1;
  static constexpr int kWide = kSplitParts == 1 ? -9 : 0, kFaint = kSplitParts == 1 ? -12 : 0;
};

// The chunks of a block that one thread loads, each kSplitThreads after the one before. They are at
// the same place of their lines.
using SplitShare = Chunk<float>[kSplitLoads];

// The exponent of a finite magnitude other than zero.
__device__ inline int exponent_of(uint32_t bits) {
  const int exponent = static_cast<int>(bits >> 23);
  return exponent > 0 ? exponent - 127 : 31 - 149 - __clz(static_cast<int>(bits));
}

// Finds the largest magnitude for each k of a block. The threads of the block call it together.
// `largest` must be zero before.
__device__ inline void find_largest(const SplitShare& share, bool lines_along_k, int thread,
                                    uint32_t (&largest)[kSplitBlock]) {
  constexpr uint32_t kMagnitude = 0x7fffffff;
  if (lines_along_k) {
    // All chunks of a thread hold the same four k.
    uint32_t most[4] = {};
#pragma unroll
    for (const Chunk<float>& chunk : share) {
#pragma unroll
      for (int e = 0; e < 4; ++e) most[e] = max(most[e], chunk.words[e] & kMagnitude);
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      most[e] = max(most[e], __shfl_xor_sync(~0u, most[e], kSplitLineChunks));
      if (thread % 32 < kSplitLineChunks) {
        atomicMax(&largest[thread % kSplitLineChunks * 4 + e], most[e]);
      }
    }
  } else {
#pragma unroll
    for (int i = 0; i < kSplitLoads; ++i) {
      const uint32_t(&w)[4] = share[i].words;
      uint32_t most =
          max(max(w[0] & kMagnitude, w[1] & kMagnitude), max(w[2] & kMagnitude, w[3] & kMagnitude));
#pragma unroll
      for (int distance = kSplitLineChunks / 2; distance > 0; distance /= 2) {
        most = max(most, __shfl_xor_sync(~0u, most, distance));
      }
      if (thread % kSplitLineChunks == 0) {
        largest[(thread + i * kSplitThreads) / kSplitLineChunks] = most;
      }
    }
  }
}

// The power of two and the flags of a granule.
struct SplitScale {
  bool holds_numbers;  // finite ones, and not only zeros
  int exponent, kinds;
};

// From the largest and the least magnitude at some k, other than 0. `zeros`: some k has only zeros.
template <int kSplitParts>
__device__ inline SplitScale split_scale(uint32_t most, uint32_t least, bool zeros) {
  using Rule = SplitRule<kSplitParts>;
  if (most == 0) return {false, 0, kSplitZero};
  if (most >= 0x7f800000) return {false, 0, kSplitSpecial};
  const int exponent = (exponent_of(most) - kSplitBits + Rule::kStep - 1) & -Rule::kStep;
  const int faintest = exponent_of(least) - exponent;
  const int kinds = (zeros || faintest < Rule::kWide ? kSplitWide : 0) |
                    (faintest < Rule::kFaint ? kSplitFaint : 0) |
                    (exponent_of(least) < -110 ? kSplitTiny : 0);
  return {true, exponent, kinds};
}

// From the largest magnitudes of a block, of which `inside` k lie in the matrix. A warp calls it
// together.
template <int kSplitParts>
__device__ inline SplitScale split_scale(const uint32_t (&largest)[kSplitBlock], int64_t inside) {
  uint32_t most = 0, least = ~0u;
  bool zeros = false;
#pragma unroll
  for (int i = 0; i < kSplitBlock; i += 32) {
    const int at = i + threadIdx.x % 32;
    const uint32_t here = largest[at];
    zeros |= here == 0 && at < inside;
    most = max(most, here);
    least = min(least, here - 1);
  }
  most = __reduce_max_sync(~0u, most);
  least = __reduce_min_sync(~0u, least) + 1;
  return split_scale<kSplitParts>(most, least, __any_sync(~0u, zeros));
}

// The distance by which the largest magnitude at some k lies below the granule's bound: see
// SplitProfile.
__device__ inline uint16_t below_bound(const SplitScale& scale, uint32_t largest) {
  return scale.holds_numbers && largest != 0
             ? static_cast<uint16_t>(scale.exponent + kSplitBits - exponent_of(largest))
             : kNothingAtK;
}

// Scales the entries of a chunk by 2^shift and calls write(i, two pairs) with its split parts.
template <int kSplitParts, class Write>
__device__ inline void cut_chunk(const Chunk<float>& entries, int shift, const Write& write) {
  const float first = power_of_two(shift / 2), second = power_of_two(shift - shift / 2);
  float2 x[2];
#pragma unroll
  for (int e = 0; e < 4; e += 2)
    x[e / 2] = {entries.entry(e) * first * second, entries.entry(e + 1) * first * second};
#pragma unroll
  for (int i = 0; i < kSplitParts; ++i) {
    const __half2 rounded[2] = {__float22half2_rn(x[0]), __float22half2_rn(x[1])};
    write(i, reinterpret_cast<const uint2&>(rounded));
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      const float2 high = __half22float2(rounded[pair]);
      x[pair] = {x[pair].x - high.x, x[pair].y - high.y};
    }
  }
}

// Writes a chunk to its place. part(i) is part `i` of the block; `chunk` counts chunks of the line.
template <int kSplitParts, class Part>
__device__ inline void write_split_chunk(const Chunk<float>& entries, int shift, int line,
                                         int chunk, const Part& part) {
  const int at = line * 128 + (chunk / 2 ^ line % 8) * 16 + chunk % 2 * 8;
  cut_chunk<kSplitParts>(entries, shift, [&](int i, const uint2& pairs) {
    *reinterpret_cast<uint2*>(part(i) + at) = pairs;
  });
}

// Columns of the matrix become rows in shared memory, some at a time. The parts of an entry share a
// word, and a row has a word more, against bank conflicts.
constexpr int kTurnedLines = 16;
using TurnedLines = uint32_t[kSplitBlock][kTurnedLines + 1];

template <int kSplitParts>
__device__ inline void put_turned(const Chunk<float>& entries, int shift, int line, int chunk,
                                  TurnedLines& turned) {
  uint2 parts[2] = {};
  cut_chunk<kSplitParts>(entries, shift, [&](int i, const uint2& pairs) { parts[i] = pairs; });
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    turned[chunk * 4 + e][line] =
        __byte_perm(e < 2 ? parts[0].x : parts[0].y, e < 2 ? parts[1].x : parts[1].y,
                    e % 2 == 0 ? 0x5410 : 0x7632);
  }
}

// Stores what kThreads threads have put there: lines from `first` on, a multiple of kTurnedLines.
template <int kSplitParts, int kThreads>
__device__ inline void store_turned(const TurnedLines& turned, int thread, int first,
                                    SplitBlock<kSplitParts>& to) {
#pragma unroll
  for (int i = thread; i < kSplitBlock * kTurnedLines / 8; i += kThreads) {
    const int row = i / 2, at = row * 128 + (first / 8 + i % 2 ^ row % 8) * 16;
    const uint32_t* const from = &turned[row][i % 2 * 8];
#pragma unroll
    for (int part = 0; part < kSplitParts; ++part) {
      const auto pair = [&](int e) {
        return __byte_perm(from[e], from[e + 1], part == 0 ? 0x5410 : 0x7632);
      };
      *reinterpret_cast<uint4*>(to.parts[part] + at) = {pair(0), pair(2), pair(4), pair(6)};
    }
  }
}

// The part of an edge of a block that lies in the matrix, of which `left` begins there.
__device__ inline uint8_t edge_inside(int64_t left) {
  return static_cast<uint8_t>(left < kSplitBlock ? left : kSplitBlock);
}

// kOperands is 2 where the second matrix is the first as the other operand of a product, with the
// same split parts. In the first, lines are then along K.
template <int kSplitParts, int kOperands>
__global__ void __launch_bounds__(kNormThreads, 2)
    split(const __grid_constant__ MatrixPair<SplitParams> pair) {
  __shared__ uint32_t largest[kOperands][kSplitGroups][kSplitBlock];
  __shared__ TurnedLines turned[kOperands == 1 ? kSplitGroups : 1];
  let_next_kernel_start();
  const SplitParams& p = pair.own();
  const NormGroup group(kSplitThreads);
  const NormPlace place(p.matrix, group, pair.thread_block());
  const NormBlock<float> block = place.block<float>(p.matrix);
#pragma unroll
  for (int i = 0; i < kOperands; ++i)
    largest[i][threadIdx.x / kSplitBlock][threadIdx.x % kSplitBlock] = 0;
  if (p.zeroed != nullptr && pair.thread_block() == 0 && threadIdx.x == 0) *p.zeroed = 0;
  static_assert(kSplitGroups * kSplitBlock == kNormThreads);
  __syncthreads();

  SplitShare share;
  float sum = 0;
  AnyNonzero<float> any;
  block.load(group.thread, kSplitThreads, share);
  add_squares(share, sum, any);
#pragma unroll
  for (int x = 0; x < kOperands; ++x)
    find_largest(share, kOperands == 1 ? p.lines_along_k : x == 0, group.thread,
                 largest[x][group.index]);
  __syncthreads();
  if (p.matrix.norms != nullptr) write_norm(place, block, group, sum, any.found());
  if (!place.exists) return;

#pragma unroll
  for (int x = 0; x < kOperands; ++x) {
    const SplitOperand& split = x == 0 ? p.split : pair.matrices[1].split;
    const bool along_k = kOperands == 1 ? p.lines_along_k : x == 0;
    const int64_t inside = along_k ? block.length_left : block.lines_left;
    const SplitScale scale = split_scale<kSplitParts>(largest[x][group.index], inside);
    const int64_t i = along_k ? place.line : place.entry;
    const int64_t k = along_k ? place.entry : place.line;
    const int64_t at = (place.batch * split.extent + i) * split.depth + k;
    if (x == 0) {
      auto& to = static_cast<SplitBlock<kSplitParts>*>(split.blocks)[at];
      const int line = group.thread / kSplitLineChunks, chunk = group.thread % kSplitLineChunks;
      constexpr int kStep = kSplitThreads / kSplitLineChunks;  // from a thread's chunk to its next
      if (kOperands == 1 && p.turned) {
        const auto meet = [&] {
          asm volatile("bar.sync %0, %1;" ::"r"(1 + group.index), "n"(kSplitThreads) : "memory");
        };
        constexpr int kLoads = kTurnedLines / kStep;
#pragma unroll
        for (int first = 0; first < kSplitLoads; first += kLoads) {
          meet();
#pragma unroll
          for (int j = 0; j < kLoads; ++j) {
            put_turned<kSplitParts>(share[first + j], -scale.exponent, line + j * kStep, chunk,
                                    turned[group.index]);
          }
          meet();
          store_turned<kSplitParts, kSplitThreads>(turned[group.index], group.thread, first * kStep,
                                                   to);
        }
      } else {
#pragma unroll
        for (int j = 0; j < kSplitLoads; ++j) {
          write_split_chunk<kSplitParts>(share[j], -scale.exponent, line + j * kStep, chunk,
                                         [&](int part) { return to.parts[part]; });
        }
      }
    }
    if (group.thread < 32) {
#pragma unroll
      for (int j = group.thread; j < kSplitBlock; j += 32)
        split.profile<1>(at).below[0][j] = below_bound(scale, largest[x][group.index][j]);
    }
    if (group.thread == 0) {
      split.header<1>(at) = {block.data,
                             {static_cast<int16_t>(scale.exponent)},
                             {static_cast<uint8_t>(scale.kinds)},
                             edge_inside(along_k ? block.lines_left : block.length_left),
                             edge_inside(inside)};
    }
  }
}

}  // namespace spamm::kernels
