// One operand's share of a pipeline stage: kExtent rows of A (or columns of B), 64 bytes deep along
// K, brought in by cp.async in the order in which the operand lies in memory, zeros past its edges.
//
// Lines are what is contiguous in memory: 64 bytes along K for each row (k-major), or all kExtent
// rows for each k. The 16-byte chunks of a line are permuted by an XOR with bits of the line's
// number, so that neither the copies nor any engine's fragment loads meet bank conflicts.
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

  // A lane's place in the tile, to which constants are added later. Where lane's and constant parts
  // of the line, and of the chunk, have no bit in common, the swizzle of the sum is the XOR of both
  // swizzles: all of a lane's fragments then share a few offsets, where computing each offset by
  // itself takes more registers than there are.
  struct Place {
    int base, chunk;

    __device__ Place(int line, int chunk, int byte = 0)
        : base(line * kLineBytes + byte), chunk(chunk ^ swizzle(line)) {}

    // Of what lies `lines` and `chunks` further on, in bytes.
    __device__ int offset(int lines, int chunks) const {
      return base + lines * kLineBytes + (chunk ^ chunks ^ swizzle(lines)) * kChunkBytes;
    }
  };

  // What a line's chunk numbers are XORed with.
  __device__ static constexpr int swizzle(int line) {
    if constexpr (kKMajor) {
      // Two lines span all banks; doubles are read two chunks (four entries) of a line at a time.
      return sizeof(Element) == 8 ? line & 2 : line >> 1 & 3;
    } else {
      // ldmatrix reads one chunk of 8 lines, scalar fragments 32 bytes of 4 lines.
      return sizeof(Element) == 2 ? line & 7 : (line & 3) << 1;
    }
  }
};

// An operand seen from one tile of C, by one thread: in each of kPasses passes over the stage it
// copies one chunk, always at the same position of a line.
template <class Tile, int kThreads>
class OperandStream {
  using Element = typename Tile::Element;
  static constexpr int kPasses = Tile::kLines * Tile::kLineChunks / kThreads;
  static constexpr int kPassLines = kThreads / Tile::kLineChunks;
  static_assert(kPasses * kThreads == Tile::kLines * Tile::kLineChunks);

 public:
  // `first`: the tile's first row (or column) of `size`; `depth`: K.
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

  // Begins the copies of depth k, k + 1, ... into `stage`; of the tile's bands of 32 rows only
  // those whose bit is set in `bands` are read, and the others' old contents stay.
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

  // bytes_of(line) says how much of the thread's chunk of a line exists.
  template <class BytesOf>
  __device__ void copy_passes(char* stage, const Element* source, uint32_t bands,
                              const BytesOf& bytes_of) const {
    const int first_line = threadIdx.x / Tile::kLineChunks;
    // Made anew for each stage: kept, it would take the registers that sums need.
    const typename Tile::Place place(first_line, threadIdx.x % Tile::kLineChunks);
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass, source += kPassLines * operand_.leading) {
      const int line = first_line + pass * kPassLines;
      const int band = (Tile::kKMajor ? line : position()) / 32;
      if ((bands >> band & 1) == 0) continue;
      char* const target = stage + place.offset(pass * kPassLines, 0);
      const int bytes = bytes_of(line);
      copy_async(target, bytes > 0 ? source : operand_.data, bytes);
    }
  }

  const Operand& operand_;
  const Element* source_;  // this thread's chunk of the first pass, at k = 0
  int64_t depth_;
  int extent_;  // rows (or columns) of the tile that exist
};

}  // namespace spamm::kernels
