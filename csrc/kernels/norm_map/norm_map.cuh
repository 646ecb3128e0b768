// Frobenius norms of the blocks of a matrix: the paper's get-norm. Design:
// docs/kernels/norm_map.md.
//
// A group of 8 to 256 threads sums the squares of one block. Each lane keeps kChunks loads in
// flight to fill the memory bus, so a warp serves up to four small blocks at once.
// Half types go from memory straight into mma.sync, as A and as B: the diagonal of X X^T holds sums
// of exact squares. Tensor cores truncate when they add, so they sum only kChain instructions.
// A block whose sum leaves the safe range is summed again, with scaled entries.
// One launch serves one matrix or both operands of a product.
#pragma once

#include <cstdint>

#include "kernels/common/numeric.cuh"
#include "kernels/common/overlap.cuh"
#include "kernels/norm_map/chunk.cuh"
#include "kernels/norm_map/params.h"

namespace spamm::kernels {

constexpr int kNormWarps = kNormThreads / 32;
constexpr int kChunks = 16;  // loads in flight in each lane

// The number of threads for a block of 2^log2_entries entries. It depends on the shape alone, and
// so does the order of the sum. Each thread loads kChunks chunks or a multiple. The result is at
// least 8, because no block is smaller than 2 KiB.
template <class Element>
__host__ __device__ constexpr int norm_threads(int log2_entries) {
  const int threads = (static_cast<int>(sizeof(Element)) << log2_entries) / (kChunks * 16);
  return threads > kNormThreads ? kNormThreads : threads;
}

// One block of the matrix as a sequence of chunks.
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

  // Tells whether the whole block lies in the matrix.
  __device__ bool is_whole() const {
    return lines_left >> p.log2_block_lines != 0 && length_left >> p.log2_block_length != 0;
  }

  // The line in which a chunk lies, and its first entry there. Chunks are counted line by line.
  __device__ int line_of(int chunk) const { return chunk >> log2_line_chunks(); }
  __device__ int entry_of(int chunk) const {
    return (chunk & ((1 << log2_line_chunks()) - 1)) << kLog2Entries;
  }

  // Tells whether the whole block can be read by loads of 16 bytes.
  __device__ bool has_vectors() const { return p.vector && is_whole(); }

  // Loads chunks first, first + step, ... by one load each. Only if has_vectors(). `step` is a
  // multiple of the number of chunks in a line.
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

  // The same of any block, with zeros outside the matrix. Lanes may part ways.
  template <int kLoads>
  __device__ void load(int first, int step, Chunk<Element> (&chunks)[kLoads]) const {
    if (has_vectors()) {
      load_vectors(first, step, chunks);
    } else if (p.vector) {
      load_inside<true>(first, step, chunks);
    } else if (p.entry_stride == 1) {
      load_inside<false>(first, step, chunks);
    } else {
#pragma unroll
      for (int i = 0; i < kLoads; ++i) chunks[i] = gather(first + i * step);
    }
  }

  // Loads one chunk of any block entry by entry.
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

  // Stores what load() has loaded to the block's first entry in a copy, `to`.
  template <int kLoads>
  __device__ void copy(int first, int step, const Chunk<Element> (&chunks)[kLoads],
                       Element* to) const {
    const int line = line_of(first), entry = entry_of(first), lines = step >> log2_line_chunks();
    if (entry >= length_left) return;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      if (line + i * lines >= lines_left) continue;
      const auto& [x, y, z, w] = chunks[i].words;
      *reinterpret_cast<uint4*>(to + (line + i * lines) * p.copy_line_stride + entry) =
          uint4{x, y, z, w};
    }
  }

 private:
  __device__ int log2_line_chunks() const { return p.log2_block_length - kLog2Entries; }

  // load() where entries of a line are neighbours. Only aligned 16 bytes with an entry of the
  // matrix are read; others of that memory are masked. kAligned: chunks begin at multiples of 16
  // bytes. Else each lies in two of them, and is shifted to its place.
  template <bool kAligned, int kLoads>
  __device__ void load_inside(int first, int step, Chunk<Element> (&chunks)[kLoads]) const {
    constexpr int kTogether = kAligned ? kLoads : 2, kSize = sizeof(Element);
    const int line = line_of(first), entry = entry_of(first);
    const int lines = step >> log2_line_chunks();  // from a chunk to the next
    const auto* const from = reinterpret_cast<const char*>(data + line * p.line_stride + entry);
    const int64_t stride = lines * p.line_stride * kSize;
    const int64_t left = min(length_left - entry, int64_t{kEntries});
    const int inside = left > 0 ? static_cast<int>(left) * kSize : 0;  // bytes of each chunk
    uint32_t masks[4];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      masks[w] = inside >= 4 * w + 4 ? ~0u : inside > 4 * w ? 0xffffu : 0;
    }
#pragma unroll
    for (int begin = 0; begin < kLoads; begin += kTogether) {
      uint32_t words[kTogether][kAligned ? 4 : 8];
      int shifts[kTogether];
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const char* const at = from + (begin + i) * stride;
        shifts[i] = kAligned ? 0 : static_cast<int>(reinterpret_cast<uintptr_t>(at) % 16);
        const bool exists = line + (begin + i) * lines < lines_left && inside > 0;
        const int end = exists ? shifts[i] + inside : 0;
        const auto* const granules = reinterpret_cast<const uint4*>(at - shifts[i]);
#pragma unroll
        for (int j = 0; j < (kAligned ? 1 : 2); ++j) {
          const uint4 loaded = end > 16 * j ? granules[j] : uint4{};
          words[i][4 * j] = loaded.x, words[i][4 * j + 1] = loaded.y;
          words[i][4 * j + 2] = loaded.z, words[i][4 * j + 3] = loaded.w;
        }
      }
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        if constexpr (!kAligned) drop_bytes(words[i], shifts[i]);
#pragma unroll
        for (int w = 0; w < 4; ++w) chunks[begin + i].words[w] = words[i][w] & masks[w];
      }
    }
  }

  // Moves the bytes from number `count` on, a multiple of an entry's size below 16, to the front.
  __device__ static void drop_bytes(uint32_t (&words)[8], int count) {
#pragma unroll
    for (int distance = 2; distance > 0; --distance) {
#pragma unroll
      for (int w = 0; w < 4 + distance; ++w) {
        if ((count & 4 * distance) != 0) words[w] = words[w + distance];
      }
    }
    if constexpr (sizeof(Element) == 2) {
#pragma unroll
      for (int w = 0; w < 4; ++w) words[w] = __funnelshift_r(words[w], words[w + 1], count % 4 * 8);
    }
  }
};

// Adds a thread's chunks to its part of a block's sum of squares, in the order of the array.
template <class Element, int kLoads>
__device__ __forceinline__ void add_squares(const Chunk<Element> (&chunks)[kLoads],
                                            NormOf<Element>& sum, AnyNonzero<Element>& any) {
#pragma unroll
  for (int i = 0; i < kLoads; i += kChain) sum += chain_of_squares(chunks + i);
#pragma unroll
  for (const Chunk<Element>& chunk : chunks) any.add(chunk);
}

// Computes a thread's part of a block's sum of squares, and whether any of its entries is not zero.
// All lanes of a warp call it together. Lanes without a block pass one that holds only zeros. The
// sum does not depend on how the entries are loaded. kCopies: they are also copied to `copy`, where
// the block begins there; null: they are not.
template <bool kCopies = false, class Block>
__device__ void sum_squares(const Block& block, int thread, int threads, typename Block::Norm& sum,
                            bool& nonzero, typename Block::Element* copy = nullptr) {
  using Element = typename Block::Element;
  AnyNonzero<Element> any;
  if (!kCopies && __all_sync(~0u, block.has_vectors())) {
    for (int first = thread; first < block.chunks(); first += kChunks * threads) {
      Chunk<Element> loaded[kChunks];
      block.load_vectors(first, threads, loaded);
      add_squares(loaded, sum, any);
    }
  } else {
    constexpr int kLoads = kChunks / 2;  // masks and shifts need registers
    for (int first = thread; first < block.chunks(); first += kLoads * threads) {
      Chunk<Element> loaded[kLoads];
      block.load(first, threads, loaded);
      if constexpr (kCopies) {
        if (copy != nullptr) block.copy(first, threads, loaded, copy);
      }
      __syncwarp();
      add_squares(loaded, sum, any);
    }
  }
  nonzero = any.found();
}

// The threads that share a block: a part of a warp, a warp or several warps. All groups of a thread
// block call its functions together. Only groups of several warps use barriers.
struct NormGroup {
  int threads, index, thread;

  __device__ explicit NormGroup(int threads)
      : threads(threads), index(threadIdx.x / threads), thread(threadIdx.x % threads) {}

  // Combines one value of each thread in a fixed order. Every thread of the group gets the result.
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

  // Tells whether `x` holds in any thread that must branch together with the group: its warp, or
  // the whole thread block if groups have several warps.
  __device__ bool any(bool x) const {
    return threads <= 32 ? __any_sync(~0u, x) : __syncthreads_or(x);
  }
};

// The norm of a block from scaled entries. All groups of a thread block call it;
// groups with `needed` false only take part in the barriers.
template <class Block, class Group>
__device__ __forceinline__ typename Block::Norm inlined_scaled_norm(const Block& block,
                                                                    const Group& group,
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
  for_each_entry(needed, [&](Norm x) {
    bits = max(bits, static_cast<unsigned long long>(Bits<Norm>::of_magnitude(x)));
  });
  bits = group.reduce(bits, shared_bits, [](auto x, auto y) { return max(x, y); });
  const ScaledNorm<Norm> scaled(Bits<Norm>::to(static_cast<typename Bits<Norm>::Type>(bits)));
  Norm sum = 0;
  for_each_entry(needed && scaled.is_number(), [&](Norm x) { sum = scaled.add(sum, x); });
  sum = group.reduce(sum, shared_sums, [](Norm x, Norm y) { return x + y; });
  return scaled.norm(sum);
}

// The same, where its registers would reduce the number of loads in flight: it is rare.
template <class Block, class Group>
__device__ __noinline__ typename Block::Norm scaled_norm(const Block& block, const Group& group,
                                                         bool needed) {
  return inlined_scaled_norm(block, group, needed);
}

// The block that a group computes.
struct NormPlace {
  int64_t batch, line, entry;  // in the map
  bool exists;

  // `thread_block` counts the thread blocks that serve this matrix.
  template <class Norm>
  __device__ NormPlace(const NormMapParams<Norm>& p, const NormGroup& group,
                       uint32_t thread_block) {
    // A 64-bit division would take longer than the rest of the kernel, so numbers have 32 bits. The
    // caller limits the size of the map.
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

// Computes a block's norm from its threads' parts of the sum. All groups of a thread block call it.
// kInlines: without calls, around which kernels that hold more than a block spill registers.
template <bool kInlines = false, class Block, class Group>
__device__ typename Block::Norm norm_of_shares(const Block& block, const Group& group, bool exists,
                                               typename Block::Norm sum, bool nonzero) {
  using Norm = typename Block::Norm;
  __shared__ Norm shared_sums[kNormWarps];
  sum = group.reduce(sum, shared_sums, [](Norm x, Norm y) { return x + y; });
  Norm norm = sqrt(sum);

  // The sum of a block of zeros is right although it lies outside the safe range.
  const bool safe = is_safe(sum);
  if (group.any(nonzero && !safe)) {
    const auto scaled = kInlines ? inlined_scaled_norm<Block, Group> : scaled_norm<Block, Group>;
    const Norm found = scaled(block, group, exists && !safe);
    if (!safe) norm = found;
  }
  return norm;
}

// The same, and writes the norm to the map.
template <class Element, class Group>
__device__ void write_norm(const NormPlace& place, const NormBlock<Element>& block,
                           const Group& group, NormOf<Element> sum, bool nonzero) {
  const NormOf<Element> norm = norm_of_shares(block, group, place.exists, sum, nonzero);
  const NormMapParams<NormOf<Element>>& p = block.p;
  if (place.exists && group.thread == 0 && p.norms != nullptr) {
    p.norms[place.batch * p.norm_batch_stride + place.line * p.norm_line_stride +
            place.entry * p.norm_entry_stride] = norm;
  }
}

// The matrices of one launch. Thread blocks from `second_begins` on serve the second one.
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

// `zeroed`: the tile counter of the product that follows, which this kernel sets to 0. May be null.
// kCopies: the pass copies matrices that say where to.
template <class Element, bool kCopies>
__global__ void __launch_bounds__(kNormThreads, 2)
    norm_map(const __grid_constant__ MatrixPair<NormMapParams<NormOf<Element>>> pair, int* zeroed) {
  let_next_kernel_start();
  const auto& p = pair.own();
  const NormGroup group(norm_threads<Element>(p.log2_block_lines + p.log2_block_length));
  const NormPlace place(p, group, pair.thread_block());
  const NormBlock<Element> block = place.block<Element>(p);
  wait_for_previous_kernel();  // as late as possible: a division takes as long as a load
  if (zeroed != nullptr && blockIdx.x == 0 && threadIdx.x == 0) *zeroed = 0;
  NormOf<Element> sum = 0;
  bool nonzero = false;
  Element* copy = nullptr;
  if (kCopies && p.copy != nullptr) {
    copy = static_cast<Element*>(p.copy) + place.batch * p.copy_batch_stride +
           (place.line << p.log2_block_lines) * p.copy_line_stride +
           (place.entry << p.log2_block_length);
  }
  sum_squares<kCopies>(block, group.thread, group.threads, sum, nonzero, copy);
  write_norm(place, block, group, sum, nonzero);
}

}  // namespace spamm::kernels
