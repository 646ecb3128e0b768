// The epilogue of the Hopper convolution for float32. It differs from epilogue.cuh in that a box is
// staged as two blocks of 32 channels, and each thread writes its values one by one.
#pragma once

#include "kernels/conv/sm90/epilogue.cuh"

namespace spamm::kernels::conv::sm90 {

// The one of two lines of 32 channels that holds the channels of this warp's sums.
__device__ __forceinline__ int line_of_warp() { return threadIdx.x % 128 / 64; }

// The places of a thread's sums in its line of channels of each pixel, in TMA's 128-byte swizzle.
// No two lanes share a bank.
class ValuePlaces {
 public:
  __device__ __forceinline__ ValuePlaces() {
    const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int line = lane % 4 * 2 + i % 2, chunk = warp % 2 * 4 + i / 2 * 2 + lane / 16;
      offsets_[i] = line * kLineBytes + (chunk ^ line) * 16 + lane / 4 % 4 * 4;
    }
  }

  // In bytes, of sum `i`.
  __device__ __forceinline__ int operator[](int i) const {
    return offsets_[i % 4] + i / 4 * 8 * kLineBytes;
  }

 private:
  // Two neighbouring pixels of the thread's first channel, then of its second.
  int offsets_[4];
};

// Adds bias and ReLU to the values of kColumns pixels x 64 channels, from kFirst on, and stages
// them in `block`, which has the line of this warp.
template <int kColumns, int kFirst, int kSize>
__device__ __forceinline__ void stage(float (&acc)[kSize], const ChannelBias& bias, bool relu,
                                      OperandBlock& block) {
  const ValuePlaces places;
#pragma unroll
  for (int i = 0; i < kColumns / 2; ++i) {
    float& value = acc[kFirst + i];
    value += bias.values[i / 2 % 2];
    if (relu) value = rectified(value);
    *reinterpret_cast<float*>(block.bytes + places[i]) = value;
  }
}

// Calls change(sum, x) for the thread's sums of kColumns pixels x 64 channels and the entries x of
// a block that has the line of this warp.
template <int kColumns, int kSize, class Change>
__device__ __forceinline__ void change_line(const OperandBlock& block, float (&acc)[kSize],
                                            const Change& change) {
  const ValuePlaces places;
#pragma unroll
  for (int i = 0; i < kColumns / 2; ++i) {
    change(acc[i], *reinterpret_cast<const float*>(block.bytes + places[i]));
  }
}

// A thread's part of the sum of squares of the staged values of kColumns pixels.
template <int kColumns, int kFirst, int kSize>
__device__ __forceinline__ double sum_of_squares(const float (&values)[kSize],
                                                 const PixelCounts& counts) {
  double sums[2] = {};  // short chains
#pragma unroll
  for (int i = 0; i < kColumns / 2; ++i) {
    add_square_below(sums[i % 2], static_cast<double>(values[kFirst + i]), i / 4 * 8 + i % 2,
                     counts.values[i / 2 % 2] - static_cast<int>(threadIdx.x % 4 * 2));
  }
  return sums[0] + sums[1];
}

// Stages and stores kColumns pixels of a warpgroup's box.
template <class Output, int kColumns, int kFirst, class Params, int kSize>
__device__ __forceinline__ void store_box(const Params& p, int channel, const Box& box,
                                          OperandBlock (&staging)[2], const ChannelBias& bias,
                                          bool relu, float (&acc)[kSize]) {
  const bool leads = threadIdx.x % 128 == 0;
  const int warpgroup = threadIdx.x / 128;
  if (leads) cute::tma_store_wait<0>();  // until the previous store has read shared memory
  cutlass::arch::NamedBarrier::sync(128, warpgroup);
  stage<kColumns, kFirst>(acc, bias, relu, staging[line_of_warp()]);
  cute::tma_store_fence();
  cutlass::arch::NamedBarrier::sync(128, warpgroup);
  if (leads) {
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      cute::SM90_TMA_STORE_4D::copy(&p.map_output, &staging[part], channel + part * kBlock / 2,
                                    box.column, box.row, box.image);
    }
    cute::tma_store_arrive();
  }
  Output::see(p, channel, box, staging);
}

// On return `acc` holds the stored values.
template <class Config, class Output = BoxOutput<Config>>
__device__ __forceinline__ void store(const typename Config::Params& p, int channel,
                                      const Box* boxes, OperandBlock (&staging)[2],
                                      BoxSquares<float>& shared, ChannelBias bias,
                                      float (&acc)[Config::kValues]) {
  constexpr int kSecond = kBlock / 2;  // values of the first box
  const bool relu = activate_sums(p.activation, bias, acc);
  store_box<Output, kBlock, 0>(p, channel, boxes[0], staging, bias, relu, acc);
  store_box<Output, Config::kLastWidth, kSecond>(p, channel, boxes[1], staging, bias, relu, acc);
  if (p.norm_output == nullptr) return;
  double squares[2] = {
      sum_of_squares<kBlock, 0>(acc, PixelCounts(p, channel, boxes[0])),
      sum_of_squares<Config::kLastWidth, kSecond>(acc, PixelCounts(p, channel, boxes[1]))};
  store_norms<float>(p, channel, boxes, squares, shared);
}

}  // namespace spamm::kernels::conv::sm90
