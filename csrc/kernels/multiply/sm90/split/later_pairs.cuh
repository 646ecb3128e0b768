// Pairs of blocks that a warp multiplies when all else of a tile is done.
//
// In the middle of a tile such a pair would keep the other warpgroup waiting, and the loads of one
// pair could not hide behind the products of another. Each block of C of a warp has a list of its
// own. So what it adds up, and in what order, does not depend on its neighbours.
#pragma once

#include "kernels/common/wgmma_sm90.cuh"
#include "kernels/multiply/sm90/split/three_parts.cuh"

namespace spamm::kernels::multiply::sm90 {

using kernels::sm90::kBlock;

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
