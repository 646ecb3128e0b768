// Cuts float32 matrices into split parts as split.cuh does, for blocks with edges of 32: a split
// block then holds four granules of 32 x 32, each with a power of two and flags of its own.
//
// Sixteen threads share a granule, and take its chunks in the order in which norm_map.cuh sums a
// block of 32 x 32. So the norms of such blocks have the same bits, and no barrier is needed.
//
// And what starts the kernels that cut matrices into split parts.
#pragma once

#include "kernels/common/launch.cuh"
#include "kernels/norm_map/split.cuh"

namespace spamm::kernels {

constexpr int kGranuleEdge = 32;
constexpr int kGranuleThreads = norm_threads<float>(10);
constexpr int kGranuleLoads = kGranuleEdge * kGranuleEdge / 4 / kGranuleThreads;
constexpr int kGranuleLineChunks = kGranuleEdge / 4;
static_assert(kGranuleLoads == kChunks && kGranuleThreads == 2 * kGranuleLineChunks);

// The threads of a granule, as NormGroup. Without barriers and shared memory.
struct GranuleGroup {
  static constexpr int threads = kGranuleThreads;
  int index = threadIdx.x / threads, thread = threadIdx.x % threads;

  template <class T, class Combine>
  __device__ T reduce(T x, T (&)[kNormWarps], const Combine& combine) const {
#pragma unroll
    for (int distance = threads / 2; distance > 0; distance /= 2)
      x = combine(x, __shfl_xor_sync(~0u, x, distance));
    return x;
  }
  __device__ bool any(bool x) const { return __any_sync(~0u, x); }
};

// The line of a thread's chunk `i`. All of them are at the same place of their lines.
__device__ inline int granule_line(int i, int thread) {
  return i * 2 + thread / kGranuleLineChunks;
}

// The largest magnitudes of a granule at some k. kAlongK: lines are along K.
template <bool kAlongK>
struct LargestAtK {
  static constexpr int kCount = kAlongK ? 4 : 2, kStep = kAlongK ? 1 : 2;
  uint32_t most[kCount] = {};
  int first;

  __device__ int k(int i) const { return first + i * kStep; }
};

// Splits the largest magnitudes of several lines, known to two threads each for its own part, one
// of them keeps the upper half and the other the lower half.
template <int kHalf>
__device__ inline void keep_half(const uint32_t (&all)[2 * kHalf], uint32_t (&half)[kHalf],
                                 int thread) {
  constexpr int kDistance = kHalf / 2;
  const bool upper = (thread & kDistance) != 0;
#pragma unroll
  for (int i = 0; i < kHalf; ++i) {
    const uint32_t low = all[i], high = all[i + kHalf];
    half[i] = max(upper ? high : low, __shfl_xor_sync(~0u, upper ? low : high, kDistance));
  }
}

// The sum of norm_map.cuh, with the same bits, and the largest magnitudes. The threads of the
// granule call it together.
template <bool kAlongK>
__device__ inline LargestAtK<kAlongK> measure_granule(const Chunk<float> (&chunks)[kGranuleLoads],
                                                      int thread, float& sum, bool& nonzero) {
  constexpr uint32_t kMagnitude = 0x7fffffff;
  LargestAtK<kAlongK> largest;
  uint32_t lines[kGranuleLoads];
  AnyNonzero<float> any;
#pragma unroll
  for (int first = 0; first < kGranuleLoads; first += kChain) {
#pragma unroll
    for (int i = 0; i < kChain; ++i) {
      const Chunk<float>& chunk = chunks[first + i];
      any.add(chunk);
      const auto magnitude = [&](int e) { return chunk.words[e] & kMagnitude; };
      if constexpr (kAlongK) {
#pragma unroll
        for (int e = 0; e < 4; ++e) largest.most[e] = max(largest.most[e], magnitude(e));
      } else {
        lines[first + i] = max(max(magnitude(0), magnitude(1)), max(magnitude(2), magnitude(3)));
      }
    }
    sum += chain_of_squares(chunks + first);
  }
  nonzero = any.found();
  if constexpr (kAlongK) {
#pragma unroll
    for (uint32_t& most : largest.most) {
      most = max(most, __shfl_xor_sync(~0u, most, kGranuleLineChunks));
    }
    largest.first = thread % kGranuleLineChunks * 4;
  } else {
    uint32_t eight[8], four[4];
    keep_half(lines, eight, thread);
    keep_half(eight, four, thread);
    keep_half(four, largest.most, thread);
    const int first = (thread & 4 ? 8 : 0) + (thread & 2 ? 4 : 0) + (thread & 1 ? 2 : 0);
    largest.first = granule_line(first, thread);
  }
  return largest;
}

// `inside`: the k of the granule that lie in the matrix. The threads of the granule call it
// together, and all get the result.
template <bool kAlongK>
__device__ inline SplitScale granule_scale(const LargestAtK<kAlongK>& largest, int64_t inside) {
  const uint32_t own = 0xffffu << (threadIdx.x & kGranuleThreads);
  uint32_t most = 0, least = ~0u;
  bool zeros = false;
#pragma unroll
  for (int i = 0; i < largest.kCount; ++i) {
    const uint32_t here = largest.most[i];
    zeros |= here == 0 && largest.k(i) < inside;
    most = max(most, here);
    least = min(least, here - 1);
  }
  most = __reduce_max_sync(own, most);
  least = __reduce_min_sync(own, least) + 1;
  return split_scale<2>(most, least, __any_sync(own, zeros));
}

// One granule of a matrix: the norm, the split parts, the profile and its part of the header.
template <bool kAlongK>
__device__ inline void split_granule(const SplitParams& p, const NormPlace& block_place,
                                     int number_in_block, TurnedLines& turned) {
  const GranuleGroup group;
  const int line = number_in_block / 2, entry = number_in_block % 2;
  NormPlace place = block_place;
  place.line = place.line * 2 + line, place.entry = place.entry * 2 + entry;
  place.exists = place.exists && place.line * kGranuleEdge < p.matrix.lines &&
                 place.entry * kGranuleEdge < p.matrix.length;
  const NormBlock<float> granule = place.block<float>(p.matrix);
  Chunk<float> chunks[kGranuleLoads];
  granule.load(group.thread, kGranuleThreads, chunks);
  __syncwarp();
  float sum = 0;
  bool nonzero = false;
  const auto largest = measure_granule<kAlongK>(chunks, group.thread, sum, nonzero);
  if (p.matrix.norms != nullptr) write_norm(place, granule, group, sum, nonzero);
  const SplitScale scale =
      granule_scale(largest, kAlongK ? granule.length_left : granule.lines_left);
  if (!block_place.exists) return;

  const int64_t i = kAlongK ? block_place.line : block_place.entry;
  const int64_t k = kAlongK ? block_place.entry : block_place.line;
  const int64_t at = (block_place.batch * p.split.extent + i) * p.split.depth + k;
  auto& to = static_cast<SplitBlock<2>*>(p.split.blocks)[at];
  const int chunk = entry * kGranuleLineChunks + group.thread % kGranuleLineChunks;
  if (p.turned) {  // the two granules of a warp beside each other
    constexpr int kLoads = kTurnedLines / 2;
#pragma unroll
    for (int first = 0; first < kGranuleLoads; first += kLoads) {
      __syncwarp();
#pragma unroll
      for (int j = 0; j < kLoads; ++j) {
        put_turned<2>(chunks[first + j], -scale.exponent, granule_line(j, group.thread), chunk,
                      turned);
      }
      __syncwarp();
      store_turned<2, 32>(turned, threadIdx.x % 32, line * kGranuleEdge + first * 2, to);
    }
  } else {
#pragma unroll
    for (int j = 0; j < kGranuleLoads; ++j) {
      write_split_chunk<2>(chunks[j], -scale.exponent,
                           line * kGranuleEdge + granule_line(j, group.thread), chunk,
                           [&](int part) { return to.parts[part]; });
    }
  }
  const int along = kAlongK ? line : entry, along_k = kAlongK ? entry : line;
  auto& below = p.split.profile<2>(at).below[along];
#pragma unroll
  for (int j = 0; j < largest.kCount; ++j)
    below[along_k * kGranuleEdge + largest.k(j)] = below_bound(scale, largest.most[j]);
  if (group.thread == 0) {
    auto& header = p.split.header<2>(at);
    const int number = header.number(along, along_k);
    header.exponents[number] = static_cast<int16_t>(scale.exponent);
    header.flags[number] = static_cast<uint8_t>(scale.kinds);
    if (number == 0) {
      header.source = granule.data;
      const uint8_t lines = edge_inside(p.matrix.lines - place.line * kGranuleEdge);
      const uint8_t length = edge_inside(p.matrix.length - place.entry * kGranuleEdge);
      header.extent = kAlongK ? lines : length, header.depth = kAlongK ? length : lines;
    }
  }
}

// Cuts two matrices into granules of 32. Norms, if any, are of blocks of 32 x 32.
static __global__ void __launch_bounds__(kNormThreads, 2)
    split_granules(const __grid_constant__ MatrixPair<SplitParams> pair) {
  __shared__ TurnedLines turned[kNormWarps];
  let_next_kernel_start();
  const SplitParams& p = pair.own();
  if (p.zeroed != nullptr && pair.thread_block() == 0 && threadIdx.x == 0) *p.zeroed = 0;
  constexpr int kBlockThreads = 4 * kGranuleThreads;
  NormMapParams<float> blocks = p.matrix;
  blocks.log2_block_lines = blocks.log2_block_length = 6;
  const NormPlace place(blocks, NormGroup(kBlockThreads), pair.thread_block());
  const int number = threadIdx.x % kBlockThreads / kGranuleThreads;
  TurnedLines& own = turned[threadIdx.x / 32];
  if (p.lines_along_k) {
    split_granule<true>(p, place, number, own);
  } else {
    split_granule<false>(p, place, number, own);
  }
}

// Cuts two matrices of at most 2^31 - 1 blocks each into `split_parts` split parts (1 or 2), with
// `granules` along each edge of a block (1, or 2 if there are two split parts). Also computes the
// norm maps of those whose matrix.norms is not null. Two that share their split parts are one
// matrix in granules of 64, with lines along K in the first.
inline cudaError_t launch_split(const SplitParams (&params)[2], int split_parts, int granules,
                                cudaStream_t stream) {
  const auto thread_blocks = [](const SplitParams& p) {
    const int64_t blocks = p.matrix.batch * p.split.extent * p.split.depth;
    return static_cast<unsigned>((blocks - 1) / kSplitGroups + 1);
  };
  const MatrixPair<SplitParams> pair{{params[0], params[1]}, thread_blocks(params[0])};
  const bool turns = params[0].split.blocks == params[1].split.blocks;
  const unsigned blocks = pair.second_begins + (turns ? 0 : thread_blocks(params[1]));
  const auto kernel = granules == 2      ? split_granules
                      : split_parts == 1 ? turns ? split<1, 2> : split<1, 1>
                      : turns ? split<2, 2>
                                         : split<2, 1>;
  return launch(kernel, blocks, kNormThreads, 0, /*overlap_previous=*/false, stream, pair);
}

}  // namespace spamm::kernels
