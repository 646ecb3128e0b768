// Cuts float32 blocks of 64 x 64 into split parts for multiply/sm90/split/multiply.cuh, and
// computes their norms in the same pass, with the same bits as norm_map.cuh.
//
// A block is x = 2^exponent * (high + low), or x = 2^exponent * high. Products of two blocks that
// would lose accuracy are multiplied without split parts; the flags of SplitKind mark such blocks.
// Error analysis: docs/kernels/multiply.md (two split parts), docs/kernels/norm_map.md (one).
// One launch serves one matrix or both operands.
#pragma once

#include "kernels/common/launch.cuh"
#include "kernels/norm_map/norm_map.cuh"
#include "kernels/norm_map/split_params.h"

namespace spamm::kernels {

constexpr int kSplitThreads = norm_threads<float>(12);  // for one block
constexpr int kSplitGroups = kNormThreads / kSplitThreads;
constexpr int kSplitLineChunks = kSplitBlock / 4, kSplitChunks = kSplitBlock * kSplitLineChunks;
constexpr int kSplitLoads = kSplitChunks / kSplitThreads;
static_assert(kSplitLoads <= kChunks && kSplitThreads % kSplitLineChunks == 0);

// Exponents are multiples of kStep. A block is wide if for some k all scaled entries are below
// 2^kWide, and faint if for some k all are below 2^kFaint.
template <int kSplitParts>
struct SplitRule {
  static constexpr int kStep = kSplitParts == 1 ? 4 : 1;
  static constexpr int kWide = kSplitParts == 1 ? -9 : 0, kFaint = kSplitParts == 1 ? -12 : 0;
};

// The chunks of a block that one thread loads. Chunk i is number index(i, thread) of the block.
struct SplitShare {
  Chunk<float> chunks[kSplitLoads];

  __device__ static int index(int i, int thread) { return thread + i * kSplitThreads; }

  __device__ void load(const NormBlock<float>& block, int thread) {
    if (block.has_vectors()) {
      block.load_vectors(thread, kSplitThreads, chunks);
    } else {
#pragma unroll
      for (int i = 0; i < kSplitLoads; ++i) chunks[i] = block.gather(index(i, thread));
    }
  }
};

// The sum of norm_map.cuh, with the same bits.
__device__ inline void sum_squares(const SplitShare& share, float& sum, bool& nonzero) {
  AnyNonzero<float> any;
#pragma unroll
  for (int i = 0; i < kSplitLoads; i += kChain) sum += chain_of_squares(share.chunks + i);
#pragma unroll
  for (const Chunk<float>& chunk : share.chunks) any.add(chunk);
  nonzero = any.found();
}

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
    for (const Chunk<float>& chunk : share.chunks) {
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
      const uint32_t(&w)[4] = share.chunks[i].words;
      uint32_t most =
          max(max(w[0] & kMagnitude, w[1] & kMagnitude), max(w[2] & kMagnitude, w[3] & kMagnitude));
#pragma unroll
      for (int distance = kSplitLineChunks / 2; distance > 0; distance /= 2) {
        most = max(most, __shfl_xor_sync(~0u, most, distance));
      }
      if (thread % kSplitLineChunks == 0) {
        largest[SplitShare::index(i, thread) / kSplitLineChunks] = most;
      }
    }
  }
}

// Scales the entries of a thread's chunks by 2^shift and writes their split parts.
template <int kSplitParts>
__device__ inline void write_split_parts(const SplitShare& share, int thread, int shift,
                                         SplitBlock<kSplitParts>& to) {
  const float first = power_of_two(shift / 2), second = power_of_two(shift - shift / 2);
#pragma unroll
  for (int i = 0; i < kSplitLoads; ++i) {
    const int index = SplitShare::index(i, thread);
    const int line = index / kSplitLineChunks, chunk = index % kSplitLineChunks;
    const int at = line * 128 + (chunk / 2 ^ line % 8) * 16 + chunk % 2 * 8;
    float2 x[2];
#pragma unroll
    for (int e = 0; e < 4; e += 2) {
      x[e / 2] = {share.chunks[i].entry(e) * first * second,
                  share.chunks[i].entry(e + 1) * first * second};
    }
#pragma unroll
    for (int part = 0; part < kSplitParts; ++part) {
      const __half2 rounded[2] = {__float22half2_rn(x[0]), __float22half2_rn(x[1])};
      *reinterpret_cast<uint2*>(to.parts[part] + at) = reinterpret_cast<const uint2&>(rounded);
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        const float2 high = __half22float2(rounded[pair]);
        x[pair] = {x[pair].x - high.x, x[pair].y - high.y};
      }
    }
  }
}

template <int kSplitParts>
__global__ void __launch_bounds__(kNormThreads, 2)
    split(const __grid_constant__ MatrixPair<SplitParams> pair) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  __shared__ uint32_t largest[kSplitGroups][kSplitBlock];
  let_next_kernel_start();
  const SplitParams& p = pair.own();
  const NormGroup group(kSplitThreads);
  const NormPlace place(p.matrix, group, pair.thread_block());
  const NormBlock<float> block = place.block<float>(p.matrix);
  largest[threadIdx.x / kSplitBlock][threadIdx.x % kSplitBlock] = 0;
  if (p.zeroed != nullptr && pair.thread_block() == 0 && threadIdx.x == 0) *p.zeroed = 0;
  static_assert(kSplitGroups * kSplitBlock == kNormThreads);
  __syncthreads();

  SplitShare share;
  float sum = 0;
  bool nonzero = false;
  share.load(block, group.thread);
  sum_squares(share, sum, nonzero);
  find_largest(share, p.lines_along_k, group.thread, largest[group.index]);
  __syncthreads();
  if (p.matrix.norms != nullptr) write_norm(place, block, group, sum, nonzero);
  if (!place.exists) return;

  const int lane = threadIdx.x % 32;
  const uint32_t here[2] = {largest[group.index][lane], largest[group.index][lane + 32]};
  const uint32_t most = __reduce_max_sync(~0u, max(here[0], here[1]));
  const uint32_t least = __reduce_min_sync(~0u, min(here[0] - 1, here[1] - 1)) + 1;  // ignores 0
  const bool number = most != 0 && most < 0x7f800000;
  using Rule = SplitRule<kSplitParts>;
  const int exponent =
      number ? (exponent_of(most) - kSplitBits + Rule::kStep - 1) & -Rule::kStep : 0;
  int kinds = most == 0 ? kSplitZero : kSplitSpecial;
  if (number) {
    const int faintest = exponent_of(least) - exponent;
    kinds = (faintest < Rule::kWide ? kSplitWide : 0) | (faintest < Rule::kFaint ? kSplitFaint : 0);
  }

  const int64_t i = p.lines_along_k ? place.line : place.entry;
  const int64_t k = p.lines_along_k ? place.entry : place.line;
  const int64_t at = (place.batch * p.split.extent + i) * p.split.depth + k;
  write_split_parts(share, group.thread, -exponent,
                    static_cast<SplitBlock<kSplitParts>*>(p.split.blocks)[at]);
  if (p.split.profiles != nullptr && group.thread < 32) {
    SplitProfile& profile = p.split.profiles[at];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      profile.below[lane + half * 32] =
          number && here[half] != 0 ? exponent + kSplitBits - exponent_of(here[half]) : kNothingAtK;
    }
  }
  if (group.thread == 0) {
    const auto edge = [](int64_t left) {
      return static_cast<uint8_t>(left < kSplitBlock ? left : kSplitBlock);
    };
    p.split.headers[at] = {block.data, static_cast<int16_t>(exponent), static_cast<uint8_t>(kinds),
                           edge(block.lines_left), edge(block.length_left)};
  }
#else
  __trap();  // compiled for another target: fail, do not leave the output unwritten
#endif
}

// Cuts one or two matrices of at most 2^31 - 1 blocks each into `split_parts` split parts (1 or 2).
// Also computes the norm maps of those whose matrix.norms is not null.
inline cudaError_t launch_split(const SplitParams* params, int count, int split_parts,
                                cudaStream_t stream) {
  const auto thread_blocks = [](const SplitParams& p) {
    const int64_t blocks = p.matrix.batch * p.split.extent * p.split.depth;
    return static_cast<unsigned>((blocks - 1) / kSplitGroups + 1);
  };
  MatrixPair<SplitParams> pair{};
  pair.matrices[0] = params[0];
  pair.second_begins = thread_blocks(params[0]);
  unsigned blocks = pair.second_begins;
  if (count == 2) {
    pair.matrices[1] = params[1];
    blocks += thread_blocks(params[1]);
  }
  return launch(split_parts == 1 ? split<1> : split<2>, blocks, kNormThreads, 0,
                /*overlap_previous=*/false, stream, pair);
}

}  // namespace spamm::kernels
