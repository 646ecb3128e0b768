// The load warps of the Hopper convolution. One thread for the weights and one for the pixels read
// the lists and fetch the blocks of each step into the next stage by TMA.
#pragma once

#include <cute/arch/copy_sm90_desc.hpp>
#include <cute/arch/copy_sm90_tma.hpp>

#include "kernels/conv/sm90/pipeline.cuh"

namespace spamm::kernels::conv::sm90 {

constexpr auto kCacheHint = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);

// The bytes of all boxes whose bit is set.
template <class Config>
__device__ __forceinline__ uint32_t bytes_of_boxes(uint32_t needed) {
  uint32_t lines = 0;
#pragma unroll
  for (int i = 0; i < Config::kBoxes; ++i) {
    if (needed >> i & 1) lines += Config::is_narrow(i) ? Config::kLastWidth : kBlock;
  }
  return lines * kLineBytes;
}

// A bit for each box for which any of kRows rows has a bit.
template <class Config, int kRows = Config::kRows>
__device__ __forceinline__ uint32_t needed_boxes(uint32_t mask) {
  uint32_t needed = 0;
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
    needed |= mask >> (row * Config::kBoxes);
  }
  return needed & ((1u << Config::kBoxes) - 1);
}

template <class Config, bool kWeights>
using StageWriter = kernels::sm90::StageWriter<RingOf<Config>, kWeights>;

// Loads the weights (kWeights) or the pixels.
template <class Config, bool kWeights>
class Loader : public StageWriter<Config, kWeights> {
  using Base = StageWriter<Config, kWeights>;
  using Base::at_;

 public:
  __device__ Loader(const ConvParams& p, Storage<Config>& storage)
      : Base(storage.ring), p_(p), storage_(storage) {}

  // Fills one stage for each kDepth existing channels, or one with the residual.
  __device__ void load(const Tile<Config>& tile, const StepOf<Config>& step, bool ends_tile) {
    if constexpr (Config::kAddsResidual) {
      if (step.is_residual()) return load_residual(tile, step, ends_tile);
    }
#pragma unroll
    for (int part = 0; part < Config::kParts; ++part) {
      const int channel = step.group * kBlock + part * Config::kDepth;
      const bool last = part == Config::kParts - 1 || channel + Config::kDepth >= p_.shape.channels;
      load_stage(tile, step, channel, last && ends_tile);
      if (last) break;
    }
  }

 private:
  // The residual of a row's output blocks, in place of pixels.
  __device__ void load_residual(const Tile<Config>& tile, const Step& step, bool ends_tile) {
    const uint32_t needed = needed_boxes<Config>(step.mask);
    this->announce(Notice::of_residual(step.mask, ends_tile), tile,
                   kWeights ? 0 : __popc(needed) * sizeof(OperandBlock));
    if constexpr (!kWeights) {
#pragma unroll
      for (int i = 0; i < Config::kBoxes; ++i) {
        if ((needed >> i & 1) == 0) continue;
        const Box& box = tile.boxes[i];
        cute::SM90_TMA_LOAD_4D::copy(&p_.map_residual, reinterpret_cast<uint64_t*>(&this->full()),
                                     kCacheHint, &storage_.stages[at_.slot].pixels[i],
                                     tile.channel + step.group * kBlock, box.column, box.row,
                                     box.image);
      }
    }
    at_.advance();
  }

  __device__ static NoticeOf<Config> notice_of(const StepOf<Config>& step, bool ends_tile) {
    NoticeOf<Config> notice = Notice::of(step.mask, ends_tile);
    if constexpr (Config::kByPixel) {
      if (step.is_mixed) notice.bits |= Notice::kIsMixed;
#pragma unroll
      for (int i = 0; i < Config::kBoxes; ++i) notice.pixels[i] = step.pixels[i];
    }
    return notice;
  }

  __device__ void load_stage(const Tile<Config>& tile, const StepOf<Config>& step, int channel,
                             bool ends_tile) {
    const uint32_t needed = needed_boxes<Config>(step.mask);
    const uint32_t bytes =
        kWeights ? Config::kRows * sizeof(OperandBlock) : bytes_of_boxes<Config>(needed);
    this->announce(notice_of(step, ends_tile), tile, bytes);
    auto* barrier = reinterpret_cast<uint64_t*>(&this->full());
    auto& stage = storage_.stages[at_.slot];
    if constexpr (kWeights) {
      cute::SM90_TMA_LOAD_3D::copy(&p_.map_weight, barrier, kCacheHint, &stage.weight, channel,
                                   step.kernel_position, tile.channel);
    } else {
      const int row = step.kernel_row * p_.shape.dilation.rows - p_.shape.padding.rows;
      const int column = step.kernel_column * p_.shape.dilation.columns - p_.shape.padding.columns;
#pragma unroll
      for (int i = 0; i < Config::kBoxes; ++i) {
        if ((needed >> i & 1) == 0) continue;
        const Box& box = tile.boxes[i];
        const CUtensorMap& map = Config::is_narrow(i) ? p_.map_last : p_.map_input;
        cute::SM90_TMA_LOAD_4D::copy(&map, barrier, kCacheHint, &stage.pixels[i], channel,
                                     box.column * p_.shape.stride.columns + column,
                                     box.row * p_.shape.stride.rows + row, box.image);
      }
    }
    at_.advance();
  }

  const ConvParams& p_;
  Storage<Config>& storage_;
};

// A step from shared memory, in one word where it is one.
template <class Step>
__device__ __forceinline__ Step read_step(const Step& step) {
  if constexpr (sizeof(Step) == sizeof(uint64_t)) {
    return __builtin_bit_cast(Step, reinterpret_cast<const uint64_t&>(step));
  } else {
    return step;
  }
}

// The thread that loads one operand.
template <class Config, class Loader>
__device__ void load_lists(Loader loader, RingOf<Config>& ring) {
  RingPosition<Config::kLists> from;
  while (true) {
    ring.list_full[from.slot].wait(from.phase);
    const auto& list = ring.lists[from.slot];
    if (list.ends_work) break;
    const Tile<Config> tile = list.tile;
    const int count = list.count;
    const bool ends_tile = list.ends_tile;
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      loader.load(tile, read_step(list.steps[i]), ends_tile && i == count - 1);
    }
    if (ends_tile && count == 0) loader.end_tile(tile);
    ring.list_empty[from.slot].arrive();
    from.advance();
  }
  loader.end_work();
}

}  // namespace spamm::kernels::conv::sm90
