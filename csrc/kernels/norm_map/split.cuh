// Cuts float32 blocks of 64 x 64 into split parts for multiply/sm90/split/multiply.cuh, and
// computes their norms in the same pass, with the same bits as norm_map.cuh.
//
// A granule is x = 2^exponent * (high + low), or x = 2^exponent * high. A block is one granule, or
// four of 32 x 32. Products of two granules that would lose accuracy are multiplied without split
// parts; the flags of SplitKind mark such granules.
// Error analysis: docs/kernels/multiply_float32.md (two split parts), docs/kernels/norm_map.md
// (one). One launch serves one matrix or both operands.
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

// Exponents are multiples of kStep. A granule is wide if for some k all scaled entries are below
// 2^kWide, and faint if for some k all are below 2^kFaint, but not all 0.
template <int kSplitParts>
struct SplitRule {
  static constexpr int kStep = kSplitParts == 1 ? 4 : 1;
  static constexpr int kWide = kSplitParts == 1 ? -9 : 0, kFaint = kSplitParts == 1 ? -12 : 0;
};

// The chunks of a block that one thread loads. Chunk i is number index(i, thread) of the block.
//
// A thread's chunks are at the same place of their lines, and the first 1 / kGranules of them are
// in the first granule across the lines, and so on.
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

// Finds the largest magnitude for each k of a block and granule along M (or N). The threads of the
// block call it together. `largest` must be zero before.
template <int kGranules>
__device__ inline void find_largest(const SplitShare& share, bool lines_along_k, int thread,
                                    uint32_t (&largest)[kGranules][kSplitBlock]) {
  constexpr uint32_t kMagnitude = 0x7fffffff;
  if (lines_along_k) {
    // All chunks of a thread hold the same four k.
    constexpr int kGranuleLoads = kSplitLoads / kGranules;
#pragma unroll
    for (int granule = 0; granule < kGranules; ++granule) {
      uint32_t most[4] = {};
#pragma unroll
      for (int i = 0; i < kGranuleLoads; ++i) {
        const Chunk<float>& chunk = share.chunks[granule * kGranuleLoads + i];
#pragma unroll
        for (int e = 0; e < 4; ++e) most[e] = max(most[e], chunk.words[e] & kMagnitude);
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        most[e] = max(most[e], __shfl_xor_sync(~0u, most[e], kSplitLineChunks));
        if (thread % 32 < kSplitLineChunks) {
          atomicMax(&largest[granule][thread % kSplitLineChunks * 4 + e], most[e]);
        }
      }
    }
  } else {
    constexpr int kGranuleChunks = kSplitLineChunks / kGranules;
#pragma unroll
    for (int i = 0; i < kSplitLoads; ++i) {
      const uint32_t(&w)[4] = share.chunks[i].words;
      uint32_t most =
          max(max(w[0] & kMagnitude, w[1] & kMagnitude), max(w[2] & kMagnitude, w[3] & kMagnitude));
#pragma unroll
      for (int distance = kGranuleChunks / 2; distance > 0; distance /= 2) {
        most = max(most, __shfl_xor_sync(~0u, most, distance));
      }
      if (thread % kGranuleChunks == 0) {
        largest[thread % kSplitLineChunks / kGranuleChunks]
               [SplitShare::index(i, thread) / kSplitLineChunks] = most;
      }
    }
  }
}

// The power of two and the flags of a granule.
struct SplitScale {
  bool holds_numbers;  // finite ones, and not only zeros
  int exponent, kinds;
};

// From the largest magnitudes of granule `k` along K; of the block, `inside` k lie in the matrix. A
// warp calls it together.
template <int kSplitParts, int kGranules>
__device__ inline SplitScale split_scale(const uint32_t (&largest)[kSplitBlock], int k,
                                         int64_t inside) {
  using Rule = SplitRule<kSplitParts>;
  constexpr int kDepth = kSplitBlock / kGranules;
  uint32_t most = 0, least = ~0u;  // of the magnitudes other than 0
  bool zeros = false;              // at some k
#pragma unroll
  for (int i = 0; i < kDepth; i += 32) {
    const int at = k * kDepth + i + threadIdx.x % 32;
    const uint32_t here = largest[at];
    zeros |= here == 0 && at < inside;
    most = max(most, here);
    least = min(least, here - 1);
  }
  most = __reduce_max_sync(~0u, most);
  least = __reduce_min_sync(~0u, least) + 1;
  zeros = __any_sync(~0u, zeros);
  if (most == 0) return {false, 0, kSplitZero};
  if (most >= 0x7f800000) return {false, 0, kSplitSpecial};
  const int exponent = (exponent_of(most) - kSplitBits + Rule::kStep - 1) & -Rule::kStep;
  const int faintest = exponent_of(least) - exponent;
  const int kinds = (zeros || faintest < Rule::kWide ? kSplitWide : 0) |
                    (faintest < Rule::kFaint ? kSplitFaint : 0) |
                    (exponent_of(least) < -110 ? kSplitTiny : 0);
  return {true, exponent, kinds};
}

// Scales the entries of a thread's chunks by 2^shift and writes their split parts. `shifts` are
// those of the granules across the lines.
template <int kSplitParts, int kGranules>
__device__ inline void write_split_parts(const SplitShare& share, int thread,
                                         const int (&shifts)[kGranules],
                                         SplitBlock<kSplitParts>& to) {
#pragma unroll
  for (int i = 0; i < kSplitLoads; ++i) {
    const int shift = shifts[i / (kSplitLoads / kGranules)];
    const float first = power_of_two(shift / 2), second = power_of_two(shift - shift / 2);
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

// One warp calls it.
template <int kGranules>
__device__ inline void write_profile(const uint32_t (&largest)[kGranules][kSplitBlock],
                                     const SplitScale (&scales)[kGranules][kGranules],
                                     SplitProfile<kGranules>& profile) {
  constexpr int kParts = kSplitBlock / 32;
#pragma unroll
  for (int extent = 0; extent < kGranules; ++extent) {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const int k = part * 32 + threadIdx.x % 32;
      const SplitScale& scale = scales[extent][part * kGranules / kParts];
      const uint32_t here = largest[extent][k];
      const bool anything = scale.holds_numbers && here != 0;
      profile.below[extent][k] =
          anything ? scale.exponent + kSplitBits - exponent_of(here) : kNothingAtK;
    }
  }
}

// kOperands is 2 where the second matrix is the first as the other operand of a product, with the
// same split parts. In the first, lines are then along K.
template <int kSplitParts, int kGranules, int kOperands>
__global__ void __launch_bounds__(kNormThreads, 2)
    split(const __grid_constant__ MatrixPair<SplitParams> pair) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  __shared__ uint32_t largest[kOperands][kSplitGroups][kGranules][kSplitBlock];
  let_next_kernel_start();
  const SplitParams& p = pair.own();
  const NormGroup group(kSplitThreads);
  const NormPlace place(p.matrix, group, pair.thread_block());
  const NormBlock<float> block = place.block<float>(p.matrix);
#pragma unroll
  for (int i = 0; i < kOperands * kGranules; ++i) {
    largest[i / kGranules][threadIdx.x / kSplitBlock][i % kGranules][threadIdx.x % kSplitBlock] = 0;
  }
  if (p.zeroed != nullptr && pair.thread_block() == 0 && threadIdx.x == 0) *p.zeroed = 0;
  static_assert(kSplitGroups * kSplitBlock == kNormThreads);
  __syncthreads();

  SplitShare share;
  float sum = 0;
  bool nonzero = false;
  share.load(block, group.thread);
  sum_squares(share, sum, nonzero);
#pragma unroll
  for (int x = 0; x < kOperands; ++x)
    find_largest(share, kOperands == 1 ? p.lines_along_k : x == 0, group.thread,
                 largest[x][group.index]);
  __syncthreads();
  if (p.matrix.norms != nullptr) write_norm(place, block, group, sum, nonzero);
  if (!place.exists) return;

#pragma unroll
  for (int x = 0; x < kOperands; ++x) {
    const SplitOperand& split = x == 0 ? p.split : pair.matrices[1].split;
    const bool along_k = kOperands == 1 ? p.lines_along_k : x == 0;
    const int64_t inside = along_k ? block.length_left : block.lines_left;
    SplitScale scales[kGranules][kGranules];  // along M (or N), and along K
#pragma unroll
    for (int extent = 0; extent < kGranules; ++extent) {
#pragma unroll
      for (int k = 0; k < kGranules; ++k) {
        scales[extent][k] =
            split_scale<kSplitParts, kGranules>(largest[x][group.index][extent], k, inside);
      }
    }

    // The granules of a thread's chunks: one along the lines, and all across them.
    const int along = group.thread % kSplitLineChunks / (kSplitLineChunks / kGranules);
    int shifts[kGranules];
#pragma unroll
    for (int across = 0; across < kGranules; ++across) {
      int exponent = 0;
#pragma unroll
      for (int i = 0; i < kGranules; ++i) {
        if (i == along) {
          exponent = along_k ? scales[across][i].exponent : scales[i][across].exponent;
        }
      }
      shifts[across] = -exponent;
    }

    const int64_t i = along_k ? place.line : place.entry;
    const int64_t k = along_k ? place.entry : place.line;
    const int64_t at = (place.batch * split.extent + i) * split.depth + k;
    if (x == 0) {
      write_split_parts(share, group.thread, shifts,
                        static_cast<SplitBlock<kSplitParts>*>(split.blocks)[at]);
    }
    if (group.thread < 32) {
      write_profile(largest[x][group.index], scales, split.profile<kGranules>(at));
    }
    if (group.thread == 0) {
      const auto edge = [](int64_t left) {
        return static_cast<uint8_t>(left < kSplitBlock ? left : kSplitBlock);
      };
      using Header = SplitHeaderOf<kGranules>;
      Header header{block.data, {}, {}, edge(block.lines_left), edge(block.length_left)};
#pragma unroll
      for (int extent = 0; extent < kGranules; ++extent) {
#pragma unroll
        for (int k = 0; k < kGranules; ++k) {
          const int number = Header::number(extent, k);
          header.exponents[number] = static_cast<int16_t>(scales[extent][k].exponent);
          header.flags[number] = static_cast<uint8_t>(scales[extent][k].kinds);
        }
      }
      split.header<kGranules>(at) = header;
    }
  }
#else
  __trap();  // compiled for another target: fail, do not leave the output unwritten
#endif
}

// Cuts one or two matrices of at most 2^31 - 1 blocks each into `split_parts` split parts (1 or 2),
// with `granules` along each edge of a block (1, or 2 if there are two split parts). Also computes
// the norm maps of those whose matrix.norms is not null. Two that share their split parts are one
// matrix in granules of 64, with lines along K in the first.
inline cudaError_t launch_split(const SplitParams* params, int count, int split_parts, int granules,
                                cudaStream_t stream) {
  const auto thread_blocks = [](const SplitParams& p) {
    const int64_t blocks = p.matrix.batch * p.split.extent * p.split.depth;
    return static_cast<unsigned>((blocks - 1) / kSplitGroups + 1);
  };
  MatrixPair<SplitParams> pair{};
  pair.matrices[0] = params[0];
  pair.second_begins = thread_blocks(params[0]);
  unsigned blocks = pair.second_begins;
  const bool turns = count == 2 && params[0].split.blocks == params[1].split.blocks;
  if (count == 2) pair.matrices[1] = params[1];
  if (count == 2 && !turns) blocks += thread_blocks(params[1]);
  const auto kernel = turns              ? split_parts == 1 ? split<1, 1, 2> : split<2, 1, 2>
                                   : split_parts == 1 ? split<1, 1, 1>
                      : granules == 1    ? split<2, 1, 1>
                                         : split<2, 2, 1>;
  return launch(kernel, blocks, kNormThreads, 0, /*overlap_previous=*/false, stream, pair);
}

}  // namespace spamm::kernels
