// One operand in a stage: kExtent rows of A (or columns of B), 64 bytes of K. cp.async copies it in
// the memory order of the operand, with zeros beyond its edges.
//
// A line is what is contiguous in memory: 64 bytes of K of one row (k-major), or kExtent rows of
// one k. The chunks of a line are permuted by an XOR with bits of the line's number, so that
// neither the copies nor the fragment loads of any engine meet bank conflicts.
#pragma once

#include <cstdint>

#include "kernels/common/ptx_sm80.cuh"
#include "kernels/multiply/params.h"

namespace spamm::kernels {

constexpr int kStageDepthBytes = 64, kChunkBytes = 16;

template <class Element_, int kExtent_, bool kKMajor_>
struct StageTile {
  using Element = Element_;
  static constexpr int kExtent = kExtent_;
  static constexpr bool kKMajor = kKMajor_;
  static constexpr int kDepth = kStageDepthBytes / sizeof(Element);
  static constexpr int kLines = kKMajor ? kExtent : kDepth;
  static constexpr int kLineBytes = (kKMajor ? kDepth : kExtent) * sizeof(Element);
  static constexpr int kLineChunks = kLineBytes / kChunkBytes;
  static constexpr int kChunkElements = kChunkBytes / sizeof(Element);
  static constexpr int kBytes = kExtent * kStageDepthBytes;

  // A lane's place in the tile, to which the engines add constant distances. The lane's part and
  // the constant part of a line (and of a chunk) have no bit in common, so the swizzle of their sum
  // is the XOR of both swizzles. All fragments of a lane then share a few offsets; separate offsets
  // would need more registers than there are.
  struct Place {
    int base, chunk;

    __device__ Place(int line, int chunk, int byte = 0)
        : base(line * kLineBytes + byte), chunk(chunk ^ swizzle(line)) {}

    // The offset in bytes of the place `lines` and `chunks` further on.
    __device__ int offset(int lines, int chunks) const {
      return base + lines * kLineBytes + (chunk ^ chunks ^ swizzle(lines)) * kChunkBytes;
    }
  };

  // The chunk numbers of a line are XORed with this.
  __device__ static constexpr int swizzle(int line) {
    if constexpr (kKMajor) {
      // Two lines span all banks. Doubles are read two chunks (four entries) of a line at a time.
      return sizeof(Element) == 8 ? line & 2 : line >> 1 & 3;
    } else {
      // ldmatrix reads one chunk of 8 lines, two of which span all banks where they are short.
      // Scalar loads read 32 bytes of 4 lines.
      if (kLineChunks == 4) return line >> 1 & 3;
      return sizeof(Element) == 2 ? line & 7 : (line & 3) << 1;
    }
  }
};

// Copies one operand of one tile of C into stages. Each thread copies one chunk in each of kPasses
// passes, always at the same position of a line. kByEntry: or entry by entry, if the operand says
// so.
template <class Tile, int kThreads, bool kByEntry = false>
class OperandStream {
  using Element = typename Tile::Element;
  static constexpr int kPasses = Tile::kLines * Tile::kLineChunks / kThreads;
  static constexpr int kPassLines = kThreads / Tile::kLineChunks;
  static_assert(kPasses * kThreads == Tile::kLines * Tile::kLineChunks);

 public:
  // `first`: the first row (or column) of the tile. `size`: M (or N). `depth`: K.
  __device__ OperandStream(const Operand& operand, int64_t batch, int64_t first, int64_t size,
                           int64_t depth)
      : operand_(operand),
        depth_(depth),
        extent_(static_cast<int>(min(size - first, int64_t{Tile::kExtent}))) {
    const int line = threadIdx.x / Tile::kLineChunks, chunk = threadIdx.x % Tile::kLineChunks;
    source_ = static_cast<const Element*>(operand.data) + batch * operand.batch_stride +
              first * (Tile::kKMajor ? operand.leading : 1) + line * operand.leading +
              chunk * Tile::kChunkElements;
  }

  // Starts the copies of kDepth entries of K, from `k` on, into `stage`. `bands` has a bit for each
  // band of 32 rows; bands without their bit are not read and keep their old contents.
  __device__ void copy(char* stage, int64_t k, uint32_t bands) const {
    const Element* source = source_ + (Tile::kKMajor ? k : k * operand_.leading);
    const int64_t depth_left = depth_ - k;
    if (extent_ == Tile::kExtent && depth_left >= Tile::kDepth) {
      copy_passes(stage, source, bands, [](int) { return kChunkBytes; });
      return;
    }
    const int depth = static_cast<int>(max(min(depth_left, int64_t{Tile::kDepth}), int64_t{0}));
    const int lines = Tile::kKMajor ? extent_ : depth, length = Tile::kKMajor ? depth : extent_;
    const int bytes = (length - position()) * static_cast<int>(sizeof(Element));
    copy_passes(stage, source, bands,
                [&](int line) { return line < lines ? min(max(bytes, 0), kChunkBytes) : 0; });
  }

 private:
  __device__ static int position() {
    return threadIdx.x % Tile::kLineChunks * Tile::kChunkElements;
  }

  // bytes_of(line): how many bytes of the thread's chunk of that line lie inside the operand.
  template <class BytesOf>
  __device__ void copy_passes(char* stage, const Element* source, uint32_t bands,
                              const BytesOf& bytes_of) const {
    const int first_line = threadIdx.x / Tile::kLineChunks;
    // Computed anew for each stage: as a member it would occupy registers that the sums need.
    const typename Tile::Place place(first_line, threadIdx.x % Tile::kLineChunks);
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass, source += kPassLines * operand_.leading) {
      const int line = first_line + pass * kPassLines;
      const int band = (Tile::kKMajor ? line : position()) / 32;
      if ((bands >> band & 1) == 0) continue;
      char* const target = stage + place.offset(pass * kPassLines, 0);
      const int bytes = bytes_of(line);
      if constexpr (kByEntry && sizeof(Element) == 4) {
        if (operand_.by_entry) {
          const auto* const data = static_cast<const Element*>(operand_.data);
#pragma unroll
          for (int e = 0; e < Tile::kChunkElements; ++e) {
            constexpr int kBytes = sizeof(Element);
            const bool exists = e * kBytes < bytes;
            copy_word_async(target + e * kBytes, exists ? source + e : data, exists ? kBytes : 0);
          }
          continue;
        }
      }
      copy_async(target, bytes > 0 ? source : operand_.data, bytes);
    }
  }

  const Operand& operand_;
  const Element* source_;  // the thread's chunk of the first pass at k = 0
  int64_t depth_;
  int extent_;  // rows (or columns) of the tile inside the operand
};

}  // namespace spamm::kernels
