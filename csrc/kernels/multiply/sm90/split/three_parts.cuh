// Products of float32 blocks by three bfloat16 parts of each operand, straight from memory, for
// blocks whose entries differ too much for float16 (norm_map/split.cuh).
//
// bfloat16 has float32's range. x = first + second + third, each part with eight digits, exactly
// but for what lies below 2^-133: at most 2^-23 of the largest entry of its k, which is 2^-110 or
// more (kSplitTiny). Of the nine products of parts the three smallest are left out: each of them is
// below 2^-22 of the term, and of either sign. The small products come first, and each 16 of K have
// sums of their own, because tensor cores truncate when they add (promoted_sums.cuh).
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "kernels/common/ptx_sm80.cuh"
#include "kernels/common/wgmma_sm90.cuh"

namespace spamm::kernels::multiply::sm90 {

using kernels::sm90::kBlock;

// Two blocks of the original operands, and how much of them lies inside the operands. All their
// entries are finite.
struct OperandPair {
  const float *a, *b;
  uint8_t rows, columns, depth;  // 1 to 64
};

struct OperandStrides {
  int a, a_k, b, b_k;  // along M, along K; along N, along K; times 64 they fit into an int, too
};

// Pairs for the same block of C.
struct PairList {
  static constexpr int kCapacity = 16;

  int count;
  OperandPair pairs[kCapacity];
};

// Cuts x and y, neighbours along K, into parts. The first part is truncated, so that it does not
// overflow, and the second is rounded, so that the third has either sign.
__device__ __forceinline__ void cut_into_parts(float x, float y, uint32_t (&parts)[3]) {
  constexpr uint32_t kUpper = 0xffff0000, kUpperHalves = 0x7632;
  const auto upper_halves = [](float low, float high) {
    return __byte_perm(__float_as_uint(low), __float_as_uint(high), kUpperHalves);
  };
  parts[0] = upper_halves(x, y);
  x -= __uint_as_float(__float_as_uint(x) & kUpper);
  y -= __uint_as_float(__float_as_uint(y) & kUpper);
  const __nv_bfloat162 second = __floats2bfloat162_rn(x, y);
  parts[1] = reinterpret_cast<const uint32_t&>(second);
  x -= __uint_as_float(parts[1] << 16);
  y -= __uint_as_float(parts[1] & kUpper);
  parts[2] = upper_halves(x, y);
}

// Walks through the pairs of a list in slices of 16 of K, and loads a lane's entries of the 16 rows
// and the 8 * kTiles columns of a warp, in the order of mma.sync's fragments (ptx_sm80.cuh).
//
// Addresses beyond the operands are replaced by others inside: rows and columns there are not
// stored, and of K there, the entries of A are replaced by zeros.
template <int kTiles>
class SliceReader {
  static constexpr int kSlice = 16, kOwnDepths = 4;

 public:
  // `row` is the lane's first row in the block. The list is not empty.
  __device__ __forceinline__ SliceReader(const OperandStrides& strides, const PairList& list,
                                         int row)
      : strides_(strides), list_(list), row_(row) {
    begin_pair();
    begin_slice();
  }

  // Goes to the next slice. False at the end, where it stays at the last one.
  __device__ __forceinline__ bool advance() {
    if (k_ + kSlice < depth_) {
      k_ += kSlice;
    } else {
      if (pair_ + 1 == list_.count) return false;
      ++pair_;
      begin_pair();
    }
    begin_slice();
    return true;
  }

  // Register r of A's fragment: rows r % 2 * 8 below the first, depths r / 2 * 8 behind.
  __device__ __forceinline__ void load_a(float (&a)[4][2]) const {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int r = i / 2, e = i % 2;
      a[r][e] = __ldg(a_ + (rows_[r % 2] + depth_of(r / 2 * 2 + e) * strides_.a_k));
    }
  }
  __device__ __forceinline__ void load_b(int tile, float (&b)[2][2]) const {
#pragma unroll
    for (int i = 0; i < kOwnDepths; ++i)
      b[i / 2][i % 2] = __ldg(b_ + (columns_[tile] + depths_[i]));
  }

  // The number of the slice's depths, from this lane's first one on, lie inside the operands.
  __device__ __forceinline__ int depths_left() const { return depth_ - k_ - first_depth(); }

 private:
  __device__ static int first_depth() { return threadIdx.x % 4 * 2; }

  __device__ __forceinline__ int depth_of(int i) const {
    return min(k_ + first_depth() + i / 2 * 8 + i % 2, depth_ - 1);
  }

  __device__ __forceinline__ void begin_pair() {
    const OperandPair& pair = list_.pairs[pair_];
    a_ = pair.a;
    b_ = pair.b;
    k_ = 0;
    depth_ = pair.depth;
    const int rows = pair.rows, columns = pair.columns;
#pragma unroll
    for (int i = 0; i < 2; ++i) rows_[i] = min(row_ + i * 8, rows - 1) * strides_.a;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const int column = static_cast<int>(threadIdx.x % 32 / 4) + tile * 8;
      columns_[tile] = min(column, columns - 1) * strides_.b;
    }
  }

  __device__ __forceinline__ void begin_slice() {
#pragma unroll
    for (int i = 0; i < kOwnDepths; ++i) depths_[i] = depth_of(i) * strides_.b_k;
  }

  const OperandStrides strides_;
  const PairList& list_;
  int row_, pair_ = 0, k_ = 0, depth_ = 0;
  const float *a_, *b_;
  int rows_[2], columns_[kTiles], depths_[kOwnDepths];  // distances from a_ and b_
};

// totals += the products of the pairs of a list, for 8 * kTiles columns: values [kTo, kTo + 4 *
// kTiles). A warp calls it together; it computes 16 rows. Each load is a slice ahead of its use.
template <int kTiles, int kTo, class Totals>
__device__ __forceinline__ void add_in_three_parts(const OperandStrides& strides,
                                                   const PairList& list, int row, Totals& totals) {
  constexpr int kTogether = 4;  // tiles whose products hide each other's latency
  SliceReader<kTiles> reader(strides, list, row);
  float a[4][2], b[kTiles][2][2];
  reader.load_a(a);
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) reader.load_b(tile, b[tile]);
  bool more = true;
#pragma unroll 1
  while (more) {
    const int left = reader.depths_left();
    uint32_t x[4][3];
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int k = r / 2 * 8;
      cut_into_parts(k < left ? a[r][0] : 0, k + 1 < left ? a[r][1] : 0, x[r]);
    }
    more = reader.advance();
    reader.load_a(a);
#pragma unroll
    for (int first = 0; first < kTiles; first += kTogether) {
      uint32_t y[kTogether][2][3];
      float sums[kTogether][4] = {};
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        cut_into_parts(b[first + i][0][0], b[first + i][0][1], y[i][0]);
        cut_into_parts(b[first + i][1][0], b[first + i][1][1], y[i][1]);
        reader.load_b(first + i, b[first + i]);
      }
      const auto multiply = [&](int p, int q) {
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          mma_bf16(sums[i], x[0][p], x[1][p], x[2][p], x[3][p], y[i][0][q], y[i][1][q]);
        }
      };
      multiply(0, 2);
      multiply(2, 0);
      multiply(1, 1);
      multiply(0, 1);
      multiply(1, 0);
      multiply(0, 0);
#pragma unroll
      for (int i = 0; i < 4 * kTogether; ++i) {
        totals.add(kTo + first * 4 + i, sums[i / 4][i % 4], 1);
      }
    }
  }
}

// Pairs of blocks that a warp multiplies when all else of a tile is done.
//
// In the middle of a tile such a pair would keep the other warpgroup waiting, and the loads of one
// pair could not hide behind the products of another. Each block of C of a warp has a list of its
// own. So what it adds up, and in what order, does not depend on its neighbours.
//
// kColumns: blocks of C of a warpgroup.
template <int kColumns>
class LaterPairs {
  static constexpr int kTiles = kBlock / 8, kValues = kBlock / 2;

 public:
  using Room = PairList[kColumns];  // a warp's lists, in shared memory

  // A warp calls each function together.
  __device__ __forceinline__ explicit LaterPairs(Room& room) : lists_(room) {
    if (threadIdx.x % 32 < kColumns) room[threadIdx.x % 32].count = 0;
    __syncwarp();
  }

  // Keeps a pair whose product belongs to block `column`.
  __device__ __forceinline__ void keep(int column, const OperandPair& pair) {
    PairList& list = lists_[column];
    const int count = list.count;
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      list.pairs[count] = pair;
      list.count = count + 1;
    }
    __syncwarp();
    most_ = max(most_, count + 1);
  }

  // totals += the products of the full lists, or of all.
  template <class Totals>
  __device__ __forceinline__ void multiply(const OperandStrides& strides, bool all,
                                           Totals& totals) {
    const int kept = all ? 0 : PairList::kCapacity - 1;
    if (most_ <= kept) return;
    multiply_lists<0>(strides, kept, totals);
    __syncwarp();
    if (threadIdx.x % 32 < kColumns) {
      int& count = lists_[threadIdx.x % 32].count;
      if (count > kept) count = 0;
    }
    __syncwarp();
    most_ = kept;  // or less
  }

 private:
  template <int kColumn, class Totals>
  __device__ __forceinline__ void multiply_lists(const OperandStrides& strides, int kept,
                                                 Totals& totals) {
    if constexpr (kColumn < kColumns) {
      if (lists_[kColumn].count > kept) {
        const int row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
        add_in_three_parts<kTiles, kColumn * kValues>(strides, lists_[kColumn], row, totals);
      }
      multiply_lists<kColumn + 1>(strides, kept, totals);
    }
  }

  PairList* lists_;
  int most_ = 0;  // pairs of a list
};

// For kernels that multiply every pair at once.
struct NothingLater {
  struct Room {};

  __device__ explicit NothingLater(Room&) {}
  NothingLater() = default;
};

}  // namespace spamm::kernels::multiply::sm90
