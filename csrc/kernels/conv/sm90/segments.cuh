// Segments: the steps of a tile, dealt out to the thread blocks of a cluster where C has too few
// tiles to fill the chip. Each thread block computes its sums of the whole tile; join_segments()
// adds them up. A thread block has one tile.
//
// Which step belongs to which segment follows from its number alone. So whether other blocks are
// skipped changes no bit, and neither does timing. Neighbouring steps go to different segments,
// because the steps of one kernel position are often invalid together: in the padding, say. Each
// run of 2^log2_segments steps starts with another segment, so that none is left with one channel
// group.
#pragma once

#include <algorithm>
#include <cute/arch/cluster_sm90.hpp>
#include <cute/arch/util.hpp>

#include "kernels/conv/sm90/epilogue.cuh"
#include "kernels/conv/sm90/pipeline.cuh"

namespace spamm::kernels::conv::sm90 {

// The number of a tile's segments, as a power of two.
template <class Config>
__device__ __forceinline__ int log2_segments(const ConvParams& p) {
  return Config::kSegmented ? p.log2_segments : 0;
}

// The thread block's number in its cluster, which is that of its segment.
template <class Config>
__device__ __forceinline__ int segment_of_block(const ConvParams& p) {
  return blockIdx.x & ((1 << log2_segments<Config>(p)) - 1);
}

// The number of step `index` of the thread block, among all of a tile. From the number of its steps
// on, an index gives a number past the end.
template <class Config>
__device__ __forceinline__ int step_number(const ConvParams& p, int index) {
  const int log2 = log2_segments<Config>(p);
  const int within = (segment_of_block<Config>(p) - index) & ((1 << log2) - 1);
  return (index << log2) + within;
}

// The number of indices of a thread block. The last one may lie past the end.
template <class Config>
__device__ __forceinline__ int steps_of_block(const ConvParams& p) {
  return ((p.steps - 1) >> log2_segments<Config>(p)) + 1;
}

// Tells whether the thread block adds the residual.
template <class Config>
__device__ __forceinline__ bool brings_residual(const ConvParams& p) {
  return segment_of_block<Config>(p) == 0 && p.residual != nullptr;
}

// Joining: the boxes of a tile are dealt out to the thread blocks of the cluster. Each warpgroup
// writes its sums of a box into the shared memory of the thread block that finishes it, where the
// stages were. That one adds them in the order of the segments, so the result does not depend on
// timing. Nothing of it passes through global memory.

// A warpgroup's sums of one box, as they lie in its registers: four of each thread at a time.
struct BoxSums {
  static constexpr int kOfThread = kBlock / 2;

  float4 quads[kOfThread / 4][128];
};

// Both wait until all multiplying threads of the cluster have called them. The other threads of a
// cluster have ended by then, or end by themselves, and do not count. Only the second one makes
// visible what was written before, which takes longer.
__device__ __forceinline__ void wait_for_cluster() {
  __syncwarp();
  cute::cluster_arrive_relaxed();
  cute::cluster_wait();
  __syncwarp();  // the compiler moves no access to memory past this
}
__device__ __forceinline__ void share_with_cluster() {
  __syncwarp();
  cute::cluster_arrive();
  cute::cluster_wait();
  __syncwarp();
}

// Writes four sums to `to`, an address in the shared memory of the cluster.
__device__ __forceinline__ void store_quad(uint32_t to, const float* from) {
  asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(from[0]),
               "f"(from[1]), "f"(from[2]), "f"(from[3])
               : "memory");
}

// Writes a thread's sums of a box to `own` place in the shared memory of another thread block.
__device__ __forceinline__ void send(const float* sums, BoxSums& own, int block) {
  const uint32_t to =
      cute::set_block_rank(cute::cast_smem_ptr_to_uint(&own.quads[0][threadIdx.x % 128]), block);
#pragma unroll
  for (int i = 0; i < BoxSums::kOfThread / 4; ++i) {
    store_quad(to + i * sizeof(own.quads[0]), sums + i * 4);
  }
}

// `acc`: the segment's sums of a warpgroup's boxes. `warpgroup` counts the multiplying warpgroups.
template <class Config, class Shared>
__device__ __forceinline__ void join_segments(const ConvParams& p, int warpgroup, int channel,
                                              const Box* boxes, const ChannelBias& bias,
                                              Shared& storage,
                                              const float (&acc)[Config::kValues]) {
  static_assert(Config::kLastWidth == kBlock);
  constexpr int kBoxesOfTile = 2 * Config::kWarpgroups;
  static_assert(sizeof(storage.stages) >=
                std::max(kBoxesOfTile, 1 << kLog2MostSegments) * sizeof(BoxSums));
  const int segments = 1 << p.log2_segments, segment = segment_of_block<Config>(p);
  // Box number i of the tile is finished by thread block i % segments, whose boxes lie in a row.
  auto* const sums = reinterpret_cast<BoxSums*>(storage.stages);
  const auto place = [&](int box) { return (box >> p.log2_segments) * segments; };

  // Nobody reads stages any more: what was read has gone into products that were waited for.
  wait_for_cluster();
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int box = warpgroup * 2 + i;
    send(acc + i * BoxSums::kOfThread, sums[place(box) + segment], box & (segments - 1));
  }
  share_with_cluster();

  // Segments are even in number, so a thread block has the first or the second box of warpgroups.
  const int second = segment % 2, box = warpgroup * 2 + second;
  if ((box & (segments - 1)) != segment) return;
  float total[BoxSums::kOfThread] = {};
  for (int i = 0; i < segments; ++i) {
    const BoxSums& from = sums[place(box) + i];
#pragma unroll
    for (int j = 0; j < BoxSums::kOfThread / 4; ++j) {
      const float4 quad = from.quads[j][threadIdx.x % 128];
      total[j * 4] += quad.x;
      total[j * 4 + 1] += quad.y;
      total[j * 4 + 2] += quad.z;
      total[j * 4 + 3] += quad.w;
    }
  }
  const auto of_both = [&](int Box::*place) {
    return second == 0 ? boxes[0].*place : boxes[1].*place;
  };
  store_one<Config>(p, channel, {of_both(&Box::image), of_both(&Box::row), of_both(&Box::column)},
                    storage.output[warpgroup], storage.squares[warpgroup], bias, total);
}

}  // namespace spamm::kernels::conv::sm90
