// The load warps of the Hopper convolution. One thread for the weights and one for the pixels read
// the lists and fetch the blocks of each step into the next stage by TMA.
#pragma once

#include <cute/arch/copy_sm90_desc.hpp>
#include <cute/arch/copy_sm90_tma.hpp>

#include "kernels/conv/sm90/pipeline.cuh"

namespace spamm::kernels::conv::sm90 {

constexpr auto kCacheHint = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);

// The map that loads box `i` of a tile.
template <class Config>
__device__ __forceinline__ const CUtensorMap& map_of_box(const ConvParams& p, int i) {
  return Config::is_narrow(i) ? p.map_last : p.map_input[0];
}
// The bytes of all boxes whose bit is set.
template <class Config, int kBoxes = Config::kBoxes>
__device__ __forceinline__ uint32_t bytes_of_boxes(uint32_t needed) {
  uint32_t lines = 0;
#pragma unroll
  for (int i = 0; i < kBoxes; ++i) {
    if (needed >> i & 1) lines += Config::is_narrow(i) ? Config::kLastWidth : kBlock;
  }
  return lines * kLineBytes;
}

// A bit for each box for which any row of the tile has a bit.
template <class Config>
__device__ __forceinline__ uint32_t needed_boxes(uint32_t mask) {
  uint32_t needed = 0;
#pragma unroll
  for (int row = 0; row < Config::kRows * Config::kKernelRows; ++row) {
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

  // Fills one stage for each kDepth existing channels.
  __device__ void load(const Tile<Config>& tile, const StepOf<Config>& step, bool ends_tile) {
    if constexpr (Config::kAddsResidual) {
      if (step.is_residual()) {
        const Notice notice = Notice::of_residual(step.mask, ends_tile);
        return load_addend(p_.map_residual, tile, step, p_.residual_is_shared, 0, notice);
      }
    }
    if constexpr (Config::kDeviates) {
      if (step.is_base()) return load_base(tile, step, ends_tile);
    }
    if constexpr (Config::kStrips) {
      load_strips(tile, step, ends_tile);
    } else {
#pragma unroll
      for (int part = 0; part < Config::kParts; ++part) {
        const int channel = step.group * kBlock + part * Config::kDepth;
        const bool last =
            part == Config::kParts - 1 || channel + Config::kDepth >= p_.shape.channels;
        load_stage(tile, step, channel, last && ends_tile);
        if (last) break;
      }
    }
  }

 private:
  __device__ static NoticeOf<Config> notice_of(const StepOf<Config>& step, bool ends_tile) {
    NoticeOf<Config> notice = Notice::of(step.mask, ends_tile);
    if constexpr (Config::kByPixel) {
      if (step.is_mixed) notice.bits |= Notice::kIsMixed;
#pragma unroll
      for (int i = 0; i < Config::kRows * Config::kBoxes; ++i) notice.pixels[i] = step.pixels[i];
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
        cute::SM90_TMA_LOAD_4D::copy(&map_of_box<Config>(p_, i), barrier, kCacheHint,
                                     &stage.pixels[i], channel,
                                     box.column * p_.shape.stride.columns + column,
                                     box.row * p_.shape.stride.rows + row, box.image);
      }
    }
    at_.advance();
  }

  // Fills one stage with the strips of one kernel column, and the weights of the kernel rows for
  // which some output block is valid.
  __device__ void load_strips(const Tile<Config>& tile, const Step& step, bool ends_tile) {
    constexpr int kOutputBlocks = Config::kRows * Config::kBoxes;
    constexpr uint32_t kWeightBytes = Config::kRows * sizeof(OperandBlock);
    const auto is_needed = [&](int kernel_row) {
      return (step.mask >> kernel_row * kOutputBlocks & ((1u << kOutputBlocks) - 1)) != 0;
    };
    const uint32_t needed = needed_boxes<Config>(step.mask);
    uint32_t bytes = 0;
#pragma unroll
    for (int i = 0; i < (kWeights ? Config::kKernelRows : Config::kBoxes / 2); ++i) {
      if constexpr (kWeights) {
        if (is_needed(i)) bytes += kWeightBytes;
      } else {
        if (needed >> 2 * i & 3) bytes += sizeof(Strip);
      }
    }
    this->announce(Notice::of(step.mask, ends_tile), tile, bytes);
    auto* barrier = reinterpret_cast<uint64_t*>(&this->full());
    auto& stage = storage_.stages[at_.slot];
    const int channel = step.group * kBlock;
    if constexpr (kWeights) {
#pragma unroll
      for (int row = 0; row < Config::kKernelRows; ++row) {
        if (!is_needed(row)) continue;
        cute::SM90_TMA_LOAD_3D::copy(&p_.map_weight, barrier, kCacheHint, &stage.weight[row],
                                     channel, row * p_.shape.kernel.columns + step.kernel_column,
                                     tile.channel);
      }
    } else {
      const auto load = [&](const CUtensorMap& map, int own_channel) {
#pragma unroll
        for (int i = 0; i < Config::kBoxes / 2; ++i) {
          if ((needed >> 2 * i & 3) == 0) continue;
          const Box& box = tile.boxes[2 * i];
          cute::SM90_TMA_LOAD_4D::copy(&map, barrier, kCacheHint, &stage.strips[i], own_channel,
                                       box.column + step.kernel_column - p_.shape.padding.columns,
                                       box.row - p_.shape.padding.rows, box.image);
        }
      };
      const int of_first = p_.shape.channels - p_.second.channels;
      if (channel < of_first) {
        load(p_.map_input[0], channel);
      } else {
        load(p_.map_input[1], channel - of_first);
      }
    }
    at_.advance();
  }

  // Fills one stage with kDepth channels, from `part` * kDepth on, of what is added to a row's
  // output blocks, in place of pixels. `is_shared`: one image serves all.
  __device__ void load_addend(const CUtensorMap& map, const Tile<Config>& tile, const Step& step,
                              bool is_shared, int part, const Notice& notice) {
    const uint32_t needed = needed_boxes<Config>(step.mask);
    this->announce(notice, tile, kWeights ? 0 : __popc(needed) * sizeof(OperandBlock));
    if constexpr (!kWeights) {
#pragma unroll
      for (int i = 0; i < Config::kBoxes; ++i) {
        if ((needed >> i & 1) == 0) continue;
        cute::SM90_TMA_LOAD_4D::copy(&map, reinterpret_cast<uint64_t*>(&this->full()), kCacheHint,
                                     &storage_.stages[at_.slot].box(i),
                                     tile.channel + step.group * kBlock + part * Config::kDepth,
                                     tile.boxes[i].column, tile.boxes[i].row,
                                     is_shared ? 0 : tile.boxes[i].image);
      }
    }
    at_.advance();
  }

  // The base has one image, which serves all.
  __device__ void load_base(const Tile<Config>& tile, const Step& step, bool ends_tile) {
#pragma unroll
    for (int part = 0; part < Config::kParts; ++part) {
      const bool last = part == Config::kParts - 1;
      load_addend(p_.map_base, tile, step, /*is_shared=*/true, part,
                  Notice::of_base(step.mask, part, last && ends_tile));
    }
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
