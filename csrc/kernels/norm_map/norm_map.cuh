// Frobenius norms of the blocks of a matrix: the paper's get-norm.
//
// A group of 8 to 256 threads sums the squares of one block, in loads of 16 bytes where the matrix
// allows it, 16 of them in flight in each lane: what is in flight is what fills the memory bus, so
// a warp serves up to four small blocks at once. Which entry lands in which lane does not matter to
// a sum of squares, so half types go straight from memory into mma.sync with the same registers as
// A and as B: the diagonal of X X^T holds sums of exact products, accumulated in float32. (The
// paper multiplies with ones and sums in half, which rounds the squares and overflows.) Tensor
// cores truncate when they add, so a chain of kChain instructions is all that they sum before a
// float32 addition. A block whose sum has left the range in which squares are right is redone with
// its entries scaled by the power of two of the largest one. One launch serves one matrix or both
// operands of a product.
#pragma once

#include <cstdint>

#include "kernels/common/numeric.cuh"
#include "kernels/common/overlap.cuh"
#include "kernels/norm_map/chunk.cuh"
#include "kernels/norm_map/params.h"

namespace spamm::kernels {

constexpr int kNormWarps = kNormThreads / 32;
constexpr int kChunks = 16;  // loads in flight in each lane

// Threads for a block of 2^log2_entries entries, kChunks loads or a multiple for each: the order of
// a block's sum depends on nothing but its shape. At least 8, as no block is below 2 KiB.
template <class Element>
__host__ __device__ constexpr int norm_threads(int log2_entries) {
  const int threads = (static_cast<int>(sizeof(Element)) << log2_entries) / (kChunks * 16);
  return threads > kNormThreads ? kNormThreads : threads;
}

// One block of the matrix, cut into chunks.
template <class Element_>
struct NormBlock {
  using Element = Element_;
  using Norm = NormOf<Element>;
  static constexpr int kEntries = Chunk<Element>::kEntries;
  static constexpr int kLog2Entries = kEntries == 8 ? 3 : kEntries == 4 ? 2 : 1;

  const NormMapParams<Norm>& p;
  const Element* data;  // the block's first entry
  int64_t lines_left, length_left;

  __device__ int chunks() const {
    return 1 << (p.log2_block_lines + p.log2_block_length - kLog2Entries);
  }

  // Whether the matrix holds all of the block.
  __device__ bool is_whole() const {
    return lines_left >> p.log2_block_lines != 0 && length_left >> p.log2_block_length != 0;
  }

  // Whether all of the block can be read by loads of 16 bytes.
  __device__ bool has_vectors() const { return p.vector && is_whole(); }

  // Where a chunk begins, line by line.
  __device__ int line_of(int chunk) const { return chunk >> log2_line_chunks(); }
  __device__ int entry_of(int chunk) const {
    return (chunk & ((1 << log2_line_chunks()) - 1)) << kLog2Entries;
  }

  // Chunks first, first + step, ... of the block by one load of 16 bytes each: for blocks that
  // has_vectors(). `step` is a multiple of the chunks of a line.
  template <int kLoads>
  __device__ void load_vectors(int first, int step, Chunk<Element> (&chunks)[kLoads]) const {
    const Element* from = data + line_of(first) * p.line_stride + entry_of(first);
    const int64_t stride = (step >> log2_line_chunks()) * p.line_stride;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const uint4 words = *reinterpret_cast<const uint4*>(from + i * stride);
      chunks[i] = {words.x, words.y, words.z, words.w};
    }
  }

  // The same for a chunk of any block, entry by entry: zeros for those that do not exist.
  __device__ Chunk<Element> gather(int index) const {
    const int line = line_of(index), first_entry = entry_of(index);
    Chunk<Element> chunk{};
#pragma unroll
    for (int i = 0; i < kEntries; ++i) {
      if (line < lines_left && first_entry + i < length_left) {
        chunk.set(i, data[line * p.line_stride + (first_entry + i) * p.entry_stride]);
      }
    }
    return chunk;
  }

 private:
  __device__ int log2_line_chunks() const { return p.log2_block_length - kLog2Entries; }
};

// A thread's share of a block's sum of squares, and whether anything in it is not zero. All lanes
// of a warp call it together; some may have no block to sum, which is then nothing but zeros.
// The sum does not depend on how entries came from memory.
template <class Block>
__device__ void sum_squares(const Block& block, int thread, int threads, typename Block::Norm& sum,
                            bool& nonzero) {
  using Element = typename Block::Element;
  const bool vectors = block.has_vectors();
  AnyNonzero<Element> any;
  const auto add = [&](const auto& loaded) {
    constexpr int kLoads = sizeof(loaded) / sizeof(loaded[0]);
#pragma unroll
    for (int i = 0; i < kLoads; i += kChain) sum += chain_of_squares(loaded + i);
#pragma unroll
    for (const Chunk<Element>& chunk : loaded) any.add(chunk);
  };
  if (__all_sync(~0u, vectors)) {
    for (int first = thread; first < block.chunks(); first += kChunks * threads) {
      Chunk<Element> loaded[kChunks];
      block.load_vectors(first, threads, loaded);
      add(loaded);
    }
  } else {
    for (int first = thread; first < block.chunks(); first += kChain * threads) {
      Chunk<Element> loaded[kChain];
      if (vectors) {
        block.load_vectors(first, threads, loaded);
      } else {
#pragma unroll
        for (int i = 0; i < kChain; ++i) loaded[i] = block.gather(first + i * threads);
      }
      __syncwarp();
      add(loaded);
    }
  }
  nonzero = any.found();
}

// The threads that share a block: a warp, a part of one or several. All groups of a thread block
// call its functions together; one of up to a warp needs no other warp.
struct NormGroup {
  int threads, index, thread;

  __device__ explicit NormGroup(int threads)
      : threads(threads), index(threadIdx.x / threads), thread(threadIdx.x % threads) {}

  // Combines one value of each thread, in a fixed order; every thread of the group has the result.
  template <class T, class Combine>
  __device__ T reduce(T x, T (&shared)[kNormWarps], const Combine& combine) const {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      if (distance < threads) x = combine(x, __shfl_xor_sync(~0u, x, distance));
    }
    if (threads <= 32) return x;
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = x;
    __syncthreads();
    const int warps = threads / 32;
    T total = shared[index * warps];
    for (int w = 1; w < warps; ++w) total = combine(total, shared[index * warps + w]);
    return total;
  }

  // Whether `x` holds in any thread of the group, or of the groups that must go along with it.
  __device__ bool any(bool x) const {
    return threads <= 32 ? __any_sync(~0u, x) : __syncthreads_or(x);
  }
};

// The norm of a block from its entries times a power of two, by way of the largest of them. Called
// by all groups of a thread block; those with `needed` false take part in the barriers only. Not
// inlined: it is rare, and its registers would cost those of the loads in flight.
template <class Block>
__device__ __noinline__ typename Block::Norm scaled_norm(const Block& block, const NormGroup& group,
                                                         bool needed) {
  using Norm = typename Block::Norm;
  __shared__ unsigned long long shared_bits[kNormWarps];
  __shared__ Norm shared_sums[kNormWarps];
  const auto for_each_entry = [&](bool wanted, const auto& visit) {
    for (int i = group.thread; wanted && i < block.chunks(); i += group.threads) {
      const auto chunk = block.gather(i);
#pragma unroll
      for (int e = 0; e < Block::kEntries; ++e) visit(widen(chunk.entry(e)));
    }
  };

  unsigned long long bits = 0;
  for_each_entry(needed, [&](Norm x) { bits = max(bits, magnitude_bits(x)); });
  bits = group.reduce(bits, shared_bits, [](auto x, auto y) { return max(x, y); });
  const Norm largest = from_magnitude_bits<Norm>(bits);
  const ScaledNorm<Norm> scaled(largest);
  Norm sum = 0;
  for_each_entry(needed && scaled.is_number(), [&](Norm x) { sum = scaled.add(sum, x); });
  sum = group.reduce(sum, shared_sums, [](Norm x, Norm y) { return x + y; });
  return scaled.norm(sum);
}

// Which block of the batch of matrices a group has.
struct NormPlace {
  int64_t batch, line, entry;  // in the map
  bool exists;

  // `thread_block` counts those that serve the matrix.
  template <class Norm>
  __device__ NormPlace(const NormMapParams<Norm>& p, const NormGroup& group,
                       uint32_t thread_block) {
    // 32 bits, because division in 64 takes longer than all else: the caller limits the map's size.
    const uint32_t map_lines = ((p.lines - 1) >> p.log2_block_lines) + 1;
    const uint32_t map_length = ((p.length - 1) >> p.log2_block_length) + 1;
    const uint32_t number = thread_block * (blockDim.x / group.threads) + group.index;
    const uint32_t map_line = number / map_length;  // of all batches together
    entry = number - map_line * map_length;
    batch = map_line / map_lines, line = map_line - batch * map_lines;
    exists = batch < p.batch;
  }

  template <class Element>
  __device__ NormBlock<Element> block(const NormMapParams<NormOf<Element>>& p) const {
    const int64_t first_line = line << p.log2_block_lines;
    const int64_t first_entry = entry << p.log2_block_length;
    return {p,
            static_cast<const Element*>(p.data) + batch * p.batch_stride +
                first_line * p.line_stride + first_entry * p.entry_stride,
            exists ? p.lines - first_line : 0, p.length - first_entry};
  }
};

// Makes a block's norm of the threads' shares of its sum. Called by all groups of a thread block.
template <class Block>
__device__ typename Block::Norm norm_of_shares(const Block& block, const NormGroup& group,
                                               bool exists, typename Block::Norm sum,
                                               bool nonzero) {
  using Norm = typename Block::Norm;
  __shared__ Norm shared_sums[kNormWarps];
  sum = group.reduce(sum, shared_sums, [](Norm x, Norm y) { return x + y; });
  Norm norm = sqrt(sum);

  // A thread that has met a number other than zero knows when the block's sum is no good.
  const bool safe = is_safe(sum);
  if (group.any(nonzero && !safe)) {
    const Norm scaled = scaled_norm(block, group, exists && !safe);
    if (!safe) norm = scaled;
  }
  return norm;
}

// The same, written to the map.
template <class Element>
__device__ void write_norm(const NormPlace& place, const NormBlock<Element>& block,
                           const NormGroup& group, NormOf<Element> sum, bool nonzero) {
  const NormOf<Element> norm = norm_of_shares(block, group, place.exists, sum, nonzero);
  if (place.exists && group.thread == 0) {
    const NormMapParams<NormOf<Element>>& p = block.p;
    p.norms[place.batch * p.norm_batch_stride + place.line * p.norm_line_stride +
            place.entry * p.norm_entry_stride] = norm;
  }
}

// The matrices of one launch: thread blocks from `second_begins` on serve the second one.
template <class Params>
struct MatrixPair {
  Params matrices[2];
  unsigned second_begins;

  __device__ bool is_second() const { return blockIdx.x >= second_begins; }
  __device__ const Params& own() const { return matrices[is_second()]; }
  __device__ uint32_t thread_block() const {
    return blockIdx.x - (is_second() ? second_begins : 0);
  }
};

// Also sets *zeroed to 0, where it is not null, for the product that follows.
template <class Element>
__global__ void __launch_bounds__(kNormThreads, 2)
    norm_map(const __grid_constant__ MatrixPair<NormMapParams<NormOf<Element>>> pair, int* zeroed) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  if (zeroed != nullptr && blockIdx.x == 0 && threadIdx.x == 0) *zeroed = 0;
  const auto& p = pair.own();
  const NormGroup group(norm_threads<Element>(p.log2_block_lines + p.log2_block_length));
  const NormPlace place(p, group, pair.thread_block());
  const NormBlock<Element> block = place.block<Element>(p);
  NormOf<Element> sum = 0;
  bool nonzero = false;
  sum_squares(block, group.thread, group.threads, sum, nonzero);
  write_norm(place, block, group, sum, nonzero);
}

}  // namespace spamm::kernels
