// A convolution as SpAMM for Hopper (sm_90a), its im2col matrix never in memory: float16, bfloat16
// and, with TF32's precision, float32; channels last, float32 sums.
//
// The product is weight matrix times im2col matrix. A step of K is one kernel position and 64
// channels; what it needs of the im2col matrix is a box of the input (64 channels, columns, rows,
// images), shifted by that position, which one TMA load brings, zeros for the padding included.
// Skipping is exact for each pair of a weight block and a pixel block.
// Tile: a thread block makes kRows x 64 output channels of kBoxes boxes of 64 pixels.
// Pipeline, for the life of a persistent thread block:
//   list warp     claims a tile and lists the steps that hold something valid, each with one bit
//                 for every block of the output (list.cuh);
//   load warps    one for the weights and one for the pixels: a thread walks the list and has TMA
//                 fetch, into the next of kStages stages, the blocks that some bit needs;
//   warpgroups    each has 64 channels of two boxes, its sums in registers. The tile leaves by TMA
//                 as well (epilogue.cuh).
// A batch of 65 to 127 fills the second box of a pair only in part: kLastWidth, a multiple of 8, is
// as wide as the instructions then are.
// Sums run in the order of K: same bits every time.
// Limits: those of ConvShape; all counts of pixels, blocks and tiles below 2^31; block edges of 64
// or 128, or 32 where there is only one such block.
#pragma once

#include "kernels/conv/sm90/wgmma.cuh"
// (The header above comes first: it decides what CUTLASS's own headers declare.)
#include <cute/arch/copy_sm90_desc.hpp>

#include "kernels/conv/sm90/epilogue.cuh"
#include "kernels/conv/sm90/epilogue_f32.cuh"
#include "kernels/conv/sm90/list.cuh"

namespace spamm::kernels::conv {

constexpr auto kCacheHint = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);

// The boxes of the input that a bit is set for: what brings number `i`, and how many bytes all
// have.
template <class Config>
__device__ __forceinline__ const CUtensorMap& map_of_box(const ConvParams& p, int i) {
  return Config::is_narrow(i) ? p.map_last : p.map_input;
}
template <class Config, int kBoxes = Config::kBoxes>
__device__ __forceinline__ uint32_t bytes_of_boxes(uint32_t needed) {
  uint32_t lines = 0;
#pragma unroll
  for (int i = 0; i < kBoxes; ++i) {
    if (needed >> i & 1) lines += Config::is_narrow(i) ? Config::kLastWidth : kBlock;
  }
  return lines * kLineBytes;
}

// Goes from stage to stage for a thread that loads the weights, or the pixels.
template <class Config, bool kWeights>
class StageWriter {
 public:
  __device__ explicit StageWriter(Storage<Config>& storage) : storage_(storage) {}

  // A stage without operands: for a tile, or a rest of one, in which nothing is valid.
  __device__ void end_tile(const Tile<Config>& tile) {
    announce(kEndsTile, tile, 0);
    at_.advance();
  }

  __device__ void end_work() { announce(kEndsWork, {}, 0); }

 protected:
  // Waits for the next stage and tells what comes into it.
  __device__ void announce(uint32_t notice, const Tile<Config>& tile, uint32_t bytes) {
    storage_.empty[at_.slot].wait(at_.phase ^ 1);
    if constexpr (kWeights) {
      storage_.notices[at_.slot] = notice;
      if (notice & kEndsTile) storage_.tiles[at_.slot] = tile;
    }
    storage_.full[at_.slot].arrive_and_expect_tx(bytes);
  }

  // The boxes for which some row of the tile has a bit.
  __device__ static uint32_t needed_boxes(uint32_t mask) {
    uint32_t needed = 0;
#pragma unroll
    for (int row = 0; row < Config::kRows; ++row) needed |= mask >> (row * Config::kBoxes);
    return needed & ((1u << Config::kBoxes) - 1);
  }

  Storage<Config>& storage_;
  RingPosition<Config::kStages> at_;
};

// Loads the weights, or the pixels.
template <class Config, bool kWeights>
class Loader : public StageWriter<Config, kWeights> {
  using Base = StageWriter<Config, kWeights>;
  using Base::at_, Base::storage_;

 public:
  __device__ Loader(const ConvParams& p, Storage<Config>& storage) : Base(storage), p_(p) {}

  // A stage for each kDepth channels that exist.
  __device__ void load(const Tile<Config>& tile, const Step& step, bool ends_tile) {
#pragma unroll
    for (int part = 0; part < Config::kParts; ++part) {
      const int channel = step.group * kBlock + part * Config::kDepth;
      const bool last = part == Config::kParts - 1 || channel + Config::kDepth >= p_.shape.channels;
      load_stage(tile, step, channel, last && ends_tile);
      if (last) break;
    }
  }

 private:
  __device__ void load_stage(const Tile<Config>& tile, const Step& step, int channel,
                             bool ends_tile) {
    const uint32_t needed = Base::needed_boxes(step.mask);
    const uint32_t bytes =
        kWeights ? Config::kRows * sizeof(OperandBlock) : bytes_of_boxes<Config>(needed);
    this->announce(step.mask | (ends_tile ? kEndsTile : 0), tile, bytes);
    auto* barrier = reinterpret_cast<uint64_t*>(&storage_.full[at_.slot]);
    auto& stage = storage_.stages[at_.slot];
    if constexpr (kWeights) {
      cute::SM90_TMA_LOAD_3D::copy(&p_.map_weight, barrier, kCacheHint, &stage.weight, channel,
                                   step.position, tile.channel);
    } else {
      const int row = step.kernel_row * p_.shape.dilation.rows - p_.shape.padding.rows;
      const int column = step.kernel_column * p_.shape.dilation.columns - p_.shape.padding.columns;
#pragma unroll
      for (int i = 0; i < Config::kBoxes; ++i) {
        if ((needed >> i & 1) == 0) continue;
        const Box& box = tile.boxes[i];
        cute::SM90_TMA_LOAD_4D::copy(&map_of_box<Config>(p_, i), barrier, kCacheHint,
                                     &stage.pixels[i], channel,
                                     box.column * p_.shape.stride.columns + column,
                                     box.row * p_.shape.stride.rows + row, box.image);
      }
    }
    at_.advance();
  }

  const ConvParams& p_;
};

// The thread that loads one operand.
template <class Config, bool kWeights>
__device__ void load_lists(const ConvParams& p, Storage<Config>& storage) {
  Loader<Config, kWeights> loader(p, storage);
  RingPosition<Config::kLists> from;
  while (true) {
    storage.list_full[from.slot].wait(from.phase);
    const auto& list = storage.lists[from.slot];
    if (list.ends_work) break;
    const Tile<Config> tile = list.tile;
    const int count = list.count;
    const bool ends_tile = list.ends_tile;
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      loader.load(tile, list.steps[i], ends_tile && i == count - 1);
    }
    if (ends_tile && count == 0) loader.end_tile(tile);
    storage.list_empty[from.slot].arrive();
    from.advance();
  }
  loader.end_work();
}

// acc, columns kColumn to kColumn + kWidth, += 64 output channels times these columns; and waits,
// since ptxas serialises wgmma that it sees in flight across branches. Meanwhile calls
// look_ahead().
template <class Operand, int kColumn, int kWidth, int kSize, class LookAhead>
__device__ __forceinline__ void multiply_now(uint64_t weight, uint64_t pixels, float (&acc)[kSize],
                                             const LookAhead& look_ahead) {
  constexpr auto kK = sm90::Major::K;
  cute::warpgroup_arrive();
  constexpr int kDepth = kLineBytes / sizeof(Operand);
  sm90::multiply_columns<Operand, kK, kK, kColumn, kWidth, 0, kDepth>(weight, pixels, acc);
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
    sm90::hand_over<Config::kValues>(acc, wide);
    multiply_now<Operand, 0, kBlock + kLastWidth>(weight, pixels, wide, look_ahead);
    sm90::hand_over<Config::kValues>(wide, acc);
  } else if (bits == 1) {
    multiply_now<Operand, 0, kBlock>(weight, pixels, acc, look_ahead);
  } else {
    multiply_now<Operand, kBlock, kLastWidth>(weight, pixels, acc, look_ahead);
  }
}

// A descriptor that goes around the ring of stages.
template <class Config, class Stage>
class StagedDescriptor {
 public:
  __device__ explicit StagedDescriptor(const OperandBlock& in_first_stage)
      : value_(sm90::descriptor<sm90::Major::K>(in_first_stage)) {}

  __device__ uint64_t operator*() const { return value_; }
  __device__ void advance(bool to_first) {
    value_ = sm90::advance(value_, to_first ? 0u - (Config::kStages - 1) * kStep : kStep);
  }

 private:
  static constexpr uint32_t kStep = sizeof(Stage) / sm90::kDescriptorUnit;
  uint64_t value_;
};

// Where a warpgroup finds the operands of a step: both in its stage.
template <class Config>
class StagedOperands {
 public:
  __device__ StagedOperands(Storage<Config>& storage, int warpgroup)
      : weight_(storage.stages[0].weight[warpgroup * 2 / Config::kBoxes]),
        pixels_(storage.stages[0].pixels[warpgroup * 2 % Config::kBoxes]) {}

  __device__ uint64_t weight(uint32_t) { return *weight_; }
  __device__ uint64_t pixels() const { return *pixels_; }
  __device__ void advance(bool to_first) {
    weight_.advance(to_first);
    pixels_.advance(to_first);
  }

 private:
  StagedDescriptor<Config, typename Storage<Config>::Stage> weight_, pixels_;
};

// Warpgroup number `warpgroup` of those that multiply.
template <class Config, class Operands, class Shared>
__device__ void multiply_stages(const ConvParams& p, int warpgroup, Shared& storage) {
  const int row = warpgroup * 2 / Config::kBoxes, first_box = warpgroup * 2 % Config::kBoxes;
  Operands operands(storage, warpgroup);
  float acc[Config::kValues] = {};
  RingPosition<Config::kStages> at;
  const auto notice_at = [&](const RingPosition<Config::kStages>& stage) {
    storage.full[stage.slot].wait(stage.phase);
    return storage.notices[stage.slot];
  };
  uint32_t notice = notice_at(at);
  while ((notice & kEndsWork) == 0) {
    const uint32_t bits = notice >> (warpgroup * 2) & 3;
    const bool ends_tile = notice & kEndsTile;
    RingPosition<Config::kStages> next = at;
    next.advance();
    uint32_t next_notice = 0;
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
      const Tile<Config>& tile = storage.tiles[at.slot];
      channel = tile.channel + row * kBlock;
#pragma unroll
      for (int i = 0; i < 2; ++i) boxes[i] = tile.box(first_box + i);
    }
    // Warp by warp: where there is nothing to do, nothing else keeps a warpgroup together.
    __syncwarp();
    if (threadIdx.x % 32 == 0) storage.empty[at.slot].arrive();
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

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    conv_sm90(const __grid_constant__ ConvParams p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) uint8_t shared[];
  auto& storage = *reinterpret_cast<Storage<Config>*>(shared);
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  const bool elected = threadIdx.x % 32 == 0;
  let_next_kernel_start();
  if (warp == 1 && elected) {
    cute::prefetch_tma_descriptor(&p.map_input);
    if (Config::is_narrow(1)) cute::prefetch_tma_descriptor(&p.map_last);
    cute::prefetch_tma_descriptor(&p.map_weight);
    cute::prefetch_tma_descriptor(&p.map_output);
  }
  set_up_barriers<Config>(storage, warp);

  if (warp >= 4) {
    multiply_stages<Config, StagedOperands<Config>>(p, warp / 4 - 1, storage);
  } else if (warp == kListWarp) {
    list_steps<Config>(p, storage);
  } else if (warp == 1 && elected) {
    load_lists<Config, false>(p, storage);
  } else if (warp == 0 && elected) {
    load_lists<Config, true>(p, storage);
  }
#else
  __trap();  // compiled for another target: fail, do not leave the output unwritten
#endif
}

}  // namespace spamm::kernels::conv
