// clang-format off
// Convolution for Hopper (sm_90a), channels last: half types, and float32 with TF32's precision.
// Weight matrix times im2col matrix, float32 sums. A step is one kernel position and one channel
// group: its part of the im2col matrix is a shifted box of the input, one TMA load, 0 for padding.
// Tile: kRows x 64 output channels of kBoxes boxes. Thread blocks are persistent, or segments.cuh.
// Roles:  list warp   claims tiles, lists valid steps: one bit for every output block (list.cuh)
//         load warps  fetch weights and pixels that some bit needs into the ring (load.cuh)
//         warpgroups  multiply 64 channels of two boxes each; TMA stores the result (epilogue.cuh)
// Skipping and the order of sums are those of multiply/sm90/multiply.cuh. Limits: ConvShape; counts
// below 2^31; block edges of 64 or 128, or 32 for a single block. Design: docs/kernels/conv.md.
// clang-format on
#pragma once

// CUTLASS's atoms of the less common widths, before its first header: for batches that fill a box
// only in part, and for tiles without boxes.
#define CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED

#include <cute/arch/copy_sm90_desc.hpp>

#include "kernels/common/wgmma_sm90.cuh"
#include "kernels/conv/sm90/epilogue.cuh"
#include "kernels/conv/sm90/list.cuh"
#include "kernels/conv/sm90/load.cuh"
#include "kernels/conv/sm90/segments.cuh"

namespace spamm::kernels::conv::sm90 {

// acc += 64 output channels times the columns [kColumn, kColumn + kWidth). Calls look_ahead() while
// the products run, then waits for them, because ptxas serialises wgmma that stay in flight across
// branches.
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

// acc += 64 output channels times the boxes whose bits are set; at least one of two bits is set. If
// both are set, one instruction spans both boxes. Calls look_ahead() while the products run.
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

// Sets pixels of a warpgroup's two boxes to zero: those of which `valid` has no bit, if it has any.
// All images of one, and images are the slowest index. Products with zeros change no sum, and the
// weight is finite where a pixel is skipped.
__device__ __forceinline__ void clear_pixels(OperandBlock* boxes, const uint64_t* valid,
                                             int log2_pixels) {
  const int line = threadIdx.x % kBlock, box = threadIdx.x / kBlock % 2;
  const uint64_t of_box = valid[box];
  if (of_box != 0 && (of_box >> (line & ((1 << log2_pixels) - 1)) & 1) == 0) {
    auto* const chunks = reinterpret_cast<uint4*>(boxes[box].bytes + line * kLineBytes);
#pragma unroll
    for (int i = 0; i < kLineBytes / 16; ++i) chunks[(i + line) % 8] = {};
  }
  cutlass::arch::fence_view_async_shared();
  cutlass::arch::NamedBarrier::sync(128, threadIdx.x / 128);
}

// Follows a warpgroup's operand from stage to stage.
template <class Config, class Stage>
using Descriptor = kernels::sm90::StagedDescriptor<kernels::sm90::Major::K, Stage, Config::kStages>;

// `warpgroup` counts the multiplying warpgroups.
template <class Kernel, class Config = typename Kernel::Config>
__device__ void multiply_stages(const ConvParams& p, int warpgroup, Storage<Config>& storage) {
  const int row = warpgroup * 2 / Config::kBoxes, first_box = warpgroup * 2 % Config::kBoxes;
  using Stage = typename Storage<Config>::Stage;
  Descriptor<Config, Stage> weight(storage.stages[0].weight[row]);
  Descriptor<Config, Stage> pixels(storage.stages[0].pixels[first_box]);
  float acc[Config::kValues] = {};
  auto& ring = storage.ring;
  RingPosition<Config::kStages> at;
  const auto notice_at = [&](const RingPosition<Config::kStages>& stage) -> Notice {
    ring.full[stage.slot].wait(stage.phase);
    const auto& notice = ring.notices[stage.slot];
    if constexpr (Config::kByPixel) {
      if (notice.is_mixed() && notice.mask(warpgroup) != 0) {
        clear_pixels(&storage.stages[stage.slot].pixels[first_box], &notice.pixels[first_box],
                     p.box.rows + p.box.columns);
      }
    }
    return notice;
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
    // Most stages take the first way. Tests before it cost each of them.
    if (bits != 0) {
      multiply_step<Config>(bits, *weight, *pixels, acc, look_ahead);
    } else {
      if constexpr (Config::kAddsResidual) {
        add_residual<Config>(notice.brought_mask(warpgroup),
                             &storage.stages[at.slot].pixels[first_box], acc);
      }
      look_ahead();
    }
    Box boxes[2] = {};
    int channel = 0;
    if (ends_tile) {
      const Tile<Config>& tile = ring.tiles[at.slot];
      channel = tile.channel + row * kBlock;
#pragma unroll
      for (int i = 0; i < 2; ++i) boxes[i] = tile.boxes[first_box + i];
    }
    kernels::sm90::release(ring.empty[at.slot]);
    at = next;
    weight.advance(at.slot == 0);
    pixels.advance(at.slot == 0);
    if (ends_tile) {
      Kernel::finish(p, warpgroup, channel, boxes, storage, acc);
#pragma unroll
      for (float& value : acc) value = 0;
      next_notice = notice_at(at);
    }
    notice = next_notice;
  }
  if (threadIdx.x % 32 == 0) cute::tma_store_wait<0>();  // stores still read shared memory
}

// The parts of a kernel. Others replace some of them.
template <class Config_>
struct BoxKernel {
  using Config = Config_;
  template <bool kWeights>
  using Loader = sm90::Loader<Config, kWeights>;
  using Tiles = BoxTiles<Config>;

  // Stores a warpgroup's sums, which are complete.
  __device__ __forceinline__ static void finish(const ConvParams& p, int warpgroup, int channel,
                                                const Box* boxes, Storage<Config>& storage,
                                                float (&acc)[Config::kValues]) {
    ChannelBias bias;
    bias.load(p, channel, static_cast<const typename Config::Element*>(p.bias));
    if constexpr (Config::kSegmented) {
      join_segments<Config>(p, warpgroup, channel, boxes, bias, storage, acc);
    } else {
      store<Config>(p, channel, boxes, storage.output[warpgroup], storage.squares[warpgroup], bias,
                    acc);
    }
  }
};

template <class Kernel>
struct ConvRoles {
  using Config = typename Kernel::Config;
  using Storage = sm90::Storage<Config>;
  using Params = typename Config::Params;
  const Params& p;
  Storage& storage;

  __device__ __forceinline__ void set_up(int warp) const {
    if (warp == 1 && threadIdx.x % 32 == 0) {
      cute::prefetch_tma_descriptor(&p.map_input);
      if (Config::is_narrow(1)) cute::prefetch_tma_descriptor(&p.map_last);
      cute::prefetch_tma_descriptor(&p.map_weight);
      cute::prefetch_tma_descriptor(&p.map_output);
    }
    set_up_barriers<Config>(storage, warp);
  }
  __device__ __forceinline__ void load_a() const {
    load_lists<Config>(typename Kernel::template Loader<true>(p, storage), storage.ring);
  }
  __device__ __forceinline__ void load_b() const {
    load_lists<Config>(typename Kernel::template Loader<false>(p, storage), storage.ring);
  }
  __device__ __forceinline__ void list(int) const {
    list_steps<Config, typename Kernel::Tiles>(p, storage.ring);
  }
  __device__ __forceinline__ void multiply(int warp) const {
    multiply_stages<Kernel>(p, kernels::sm90::multiplying_warpgroup(warp), storage);
  }
};

// Does the work of a thread of the kernel with these roles.
template <class Roles>
__device__ __forceinline__ void run(const typename Roles::Params& p) {
  extern __shared__ __align__(1024) uint8_t shared[];
  auto& storage = *reinterpret_cast<typename Roles::Storage*>(shared);
  kernels::sm90::run_roles<typename Roles::Config>(Roles{p, storage});
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kThreadBlocks)
    conv_sm90(const __grid_constant__ ConvParams p) {
  run<ConvRoles<BoxKernel<Config>>>(p);
}

}  // namespace spamm::kernels::conv::sm90
