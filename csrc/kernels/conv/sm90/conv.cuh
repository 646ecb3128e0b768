// A convolution as SpAMM for Hopper (sm_90a), its im2col matrix never in memory: float16, bfloat16
// and, with TF32's precision, float32; channels last, float32 sums.
//
// The product is weight matrix times im2col matrix. A step of K is one kernel position and 64
// channels; what it needs of the im2col matrix is a box of the input (64 channels, columns, rows,
// images), shifted by the kernel position, which one TMA load brings. Padding comes as zeros.
// Skipping is exact for each pair of a weight block and a pixel block.
//
// Tile: a thread block makes kRows x 64 output channels of kBoxes boxes of 64 pixels.
//
// Pipeline, for the life of a persistent thread block:
//   list warp     claims a tile and lists its valid steps, each with one bit for every block of the
//                 output (list.cuh);
//   load warps    one for the weights and one for the pixels: a thread walks the list and has TMA
//                 fetch the blocks that some bit needs into the next of kStages stages (load.cuh);
//   warpgroups    each has 64 channels of two boxes, its sums in registers. TMA stores the tile
//                 (epilogue.cuh).
//
// A batch of 65 to 127 fills the second box of a pair only in part: kLastWidth, a multiple of 8, is
// as wide as the instructions then are.
// Sums run in the order of K: same bits every time.
// Limits: those of ConvShape; all counts of pixels, blocks and tiles below 2^31; block edges of 64
// or 128, or 32 where there is only one such block.
#pragma once

#include <cute/arch/copy_sm90_desc.hpp>

#include "kernels/conv/sm90/epilogue.cuh"
#include "kernels/conv/sm90/epilogue_f32.cuh"
#include "kernels/conv/sm90/list.cuh"
#include "kernels/conv/sm90/load.cuh"
#include "kernels/conv/sm90/wgmma.cuh"

namespace spamm::kernels::conv::sm90 {

// acc, columns kColumn to kColumn + kWidth, += 64 output channels times these columns; and waits,
// since ptxas serialises wgmma that it sees in flight across branches. Meanwhile calls
// look_ahead().
template <class Operand, int kColumn, int kWidth, int kSize, class LookAhead>
__device__ __forceinline__ void multiply_now(uint64_t weight, uint64_t pixels, float (&acc)[kSize],
                                             const LookAhead& look_ahead) {
  constexpr auto kK = kernels::sm90::Major::K;
  cute::warpgroup_arrive();
  constexpr int kDepth = kLineBytes / sizeof(Operand);
  kernels::sm90::multiply_columns<Operand, kK, kK, kColumn, kWidth, 0, kDepth>(weight, pixels, acc);
  cute::warpgroup_commit_batch();
  look_ahead();
  cute::warpgroup_wait<0>();
}

// acc += 64 output channels times those of the two boxes whose bits are set, one at least; calls
// look_ahead() when these products are under way.
template <class Config, class LookAhead>
__device__ __forceinline__ void multiply_step(uint32_t bits, uint64_t weight, uint64_t pixels,
                                              float (&acc)[Config::kValues],
                                              const LookAhead& look_ahead) {
  using Operand = typename Config::Operand;
  constexpr int kLastWidth = Config::kLastWidth;
  if (bits == 3) {
    float wide[Config::kValues];
    kernels::sm90::hand_over<Config::kValues>(acc, wide);
    multiply_now<Operand, 0, kBlock + kLastWidth>(weight, pixels, wide, look_ahead);
    kernels::sm90::hand_over<Config::kValues>(wide, acc);
  } else if (bits == 1) {
    multiply_now<Operand, 0, kBlock>(weight, pixels, acc, look_ahead);
  } else {
    multiply_now<Operand, kBlock, kLastWidth>(weight, pixels, acc, look_ahead);
  }
}

// The operand of a warpgroup that lies here in the first stage.
template <class Config, class Stage>
using Descriptor = kernels::sm90::StagedDescriptor<kernels::sm90::Major::K, Stage, Config::kStages>;

// Where a warpgroup finds the operands of a step: both in its stage.
template <class Config>
class StagedOperands {
 public:
  __device__ StagedOperands(Storage<Config>& storage, int warpgroup)
      : weight_(storage.stages[0].weight[warpgroup * 2 / Config::kBoxes]),
        pixels_(storage.stages[0].pixels[warpgroup * 2 % Config::kBoxes]) {}

  __device__ uint64_t weight(Notice) const { return *weight_; }
  __device__ uint64_t pixels() const { return *pixels_; }
  __device__ void advance(bool to_first) {
    weight_.advance(to_first);
    pixels_.advance(to_first);
  }

 private:
  Descriptor<Config, typename Storage<Config>::Stage> weight_, pixels_;
};

// Warpgroup number `warpgroup` of those that multiply.
template <class Config, class Operands, class Shared>
__device__ void multiply_stages(const ConvParams& p, int warpgroup, Shared& storage) {
  const int row = warpgroup * 2 / Config::kBoxes, first_box = warpgroup * 2 % Config::kBoxes;
  Operands operands(storage, warpgroup);
  float acc[Config::kValues] = {};
  auto& ring = storage.ring;
  RingPosition<Config::kStages> at;
  const auto notice_at = [&](const RingPosition<Config::kStages>& stage) {
    ring.full[stage.slot].wait(stage.phase);
    return ring.notices[stage.slot];
  };
  Notice notice = notice_at(at);
  while (!notice.ends_work()) {
    const uint32_t bits = notice.mask(warpgroup);
    const bool ends_tile = notice.ends_tile();
    RingPosition<Config::kStages> next = at;
    next.advance();
    Notice next_notice{};
    const auto look_ahead = [&] {
      if (!ends_tile) next_notice = notice_at(next);
    };
    if (bits != 0) {
      multiply_step<Config>(bits, operands.weight(notice), operands.pixels(), acc, look_ahead);
    } else {
      look_ahead();
    }
    Box boxes[2] = {};
    int channel = 0;
    if (ends_tile) {
      const Tile<Config>& tile = ring.tiles[at.slot];
      channel = tile.channel + row * kBlock;
#pragma unroll
      for (int i = 0; i < 2; ++i) boxes[i] = tile.box(first_box + i);
    }
    kernels::sm90::release(ring.empty[at.slot]);
    at = next;
    operands.advance(at.slot == 0);
    if (ends_tile) {
      ChannelBias bias;
      bias.load(p, channel, static_cast<const typename Config::Element*>(p.bias));
      store<Config>(p, channel, boxes, storage.output[warpgroup], storage.squares[warpgroup], bias,
                    acc);
#pragma unroll
      for (float& value : acc) value = 0;
      next_notice = notice_at(at);
    }
    notice = next_notice;
  }
  if (threadIdx.x % 128 == 0) cute::tma_store_wait<0>();  // they read shared memory
}

// Before the barriers are set up.
template <class Config>
__device__ __forceinline__ void prefetch_maps(const ConvParams& p, int warp) {
  if (warp != 1 || threadIdx.x % 32 != 0) return;
  cute::prefetch_tma_descriptor(&p.map_input);
  if (Config::is_narrow(1)) cute::prefetch_tma_descriptor(&p.map_last);
  cute::prefetch_tma_descriptor(&p.map_weight);
  cute::prefetch_tma_descriptor(&p.map_output);
}

template <class Config>
struct ConvRoles {
  const ConvParams& p;
  Storage<Config>& storage;

  __device__ __forceinline__ void set_up(int warp) const {
    prefetch_maps<Config>(p, warp);
    set_up_barriers<Config>(storage, warp);
  }
  __device__ __forceinline__ void load_a() const {
    load_lists<Config>(Loader<Config, true>(p, storage), storage.ring);
  }
  __device__ __forceinline__ void load_b() const {
    load_lists<Config>(Loader<Config, false>(p, storage), storage.ring);
  }
  __device__ __forceinline__ void list(int) const { list_steps<Config>(p, storage); }
  __device__ __forceinline__ void multiply(int warp) const {
    multiply_stages<Config, StagedOperands<Config>>(p, kernels::sm90::multiplying_warpgroup(warp),
                                                    storage);
  }
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    conv_sm90(const __grid_constant__ ConvParams p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) uint8_t shared[];
  auto& storage = *reinterpret_cast<Storage<Config>*>(shared);
  kernels::sm90::run_roles<Config>(ConvRoles<Config>{p, storage});
#else
  __trap();  // compiled for another target: fail, do not leave the output unwritten
#endif
}

}  // namespace spamm::kernels::conv::sm90
