// The Hopper convolution (conv.cuh) with few output channels: its weights stay in shared
// memory.
//
// A tile is all channels of two neighbouring columns x two boxes of 64 images; a warpgroup makes a
// column. A step is a block of the input (a pixel, 64 channels, both boxes), which serves a
// kernel position of the first column and the one before it of the second: a kernel of 3 x 3 reads
// 12 blocks for 18 products, where a tile of one column reads 18 and their weights.
// The weights come before any norm is known and, where they are known to be finished, while the
// kernel before still runs.
// Sums run in the order of K, as in the other kernel, and give the same bits.
// Limits: takes_resident().
#pragma once

#include "kernels/conv/sm90/conv.cuh"

namespace spamm::kernels::conv {

template <class Element, int kLastWidth>
struct ResidentConfig : Config<Element, 1, 4, kLastWidth, 4> {
  static constexpr int kListCapacity = 32;  // all steps of a tile
};

// Its first box says it all; the norm kernel's thread blocks must find room beside the storage.
template <class Element, int kLastWidth>
struct Tile<ResidentConfig<Element, kLastWidth>> {
  static constexpr int channel = 0;
  Box first;

  // Images, then columns.
  __device__ Box box(int i) const {
    return {first.image + i % 2 * kBlock, first.row, first.column + i / 2};
  }
};

template <class Config>
struct ResidentStorage {
  struct Stage {
    OperandBlock pixels[2];
  };

  OperandBlock weights[kResidentBlocks];  // channel group by channel group, kernel positions within
  Stage stages[Config::kStages];
  OperandBlock output[Config::kWarpgroups];
  BoxSquares<typename Config::Element> squares[Config::kWarpgroups];
  typename Storage<Config>::List lists[Config::kLists];
  // As the other kernel's, and the number of the first column's weight.
  uint32_t notices[Config::kStages];
  Tile<Config> tiles[Config::kStages];
  alignas(8) Barrier full[Config::kStages], empty[Config::kStages];
  Barrier list_full[Config::kLists], list_empty[Config::kLists], weight_full[kResidentBlocks];

  __device__ void initialize() {
    for (int i = 0; i < Config::kStages; ++i) {
      full[i].init(1);
      empty[i].init(4 * Config::kWarpgroups);
    }
    for (int i = 0; i < Config::kLists; ++i) {
      list_full[i].init(32);
      list_empty[i].init(1);
    }
    for (Barrier& barrier : weight_full) barrier.init(1);
    cutlass::arch::fence_barrier_init();
  }
};

constexpr int kWeightShift = 8;  // of a weight's number in a notice

// Where the warpgroup of a column finds the operands of a step.
template <class Config>
class ResidentOperands {
 public:
  __device__ ResidentOperands(ResidentStorage<Config>& storage, int column)
      : storage_(storage),
        weights_(sm90::descriptor<sm90::Major::K>(storage.weights[0])),
        pixels_(storage.stages[0].pixels[0]),
        column_(column) {}

  // Once it is there.
  __device__ uint64_t weight(uint32_t notice) const {
    const uint32_t number = (notice >> kWeightShift & 0xff) - column_;
    storage_.weight_full[number].wait(0);
    return sm90::advance(weights_, number * (sizeof(OperandBlock) / sm90::kDescriptorUnit));
  }
  __device__ uint64_t pixels() const { return *pixels_; }
  __device__ void advance(bool to_first) { pixels_.advance(to_first); }

 private:
  ResidentStorage<Config>& storage_;
  uint64_t weights_;
  StagedDescriptor<Config, typename ResidentStorage<Config>::Stage> pixels_;
  int column_;
};

template <class Config>
__device__ Tile<Config> resident_tile_at(const ConvParams& p, int number) {
  int pair, row, images;
  p.by_box_columns(number, pair, number);
  p.by_box_rows(images, row, number);
  return {{images * 2 * kBlock, row, pair * 2}};
}

// A lane's step: a block of the input within the window of both columns. The kernel position is
// the first column's, or would be if the kernel had one column more.
__device__ inline Step resident_step_at(const ConvParams& p, int number) {
  const int columns = p.shape.kernel.columns + 1;
  const int group = number % p.box_groups, row = number / p.box_groups / columns;
  const int column = number / p.box_groups % columns;
  return {0, static_cast<uint16_t>(group), static_cast<uint8_t>(row), static_cast<uint8_t>(column),
          static_cast<uint16_t>(row * p.shape.kernel.columns + column)};
}

// Which products of a lane's step are valid.
template <class Config>
class ResidentNorms {
 public:
  // Reads nothing yet.
  __device__ ResidentNorms(const ConvParams& p, const Tile<Config>& tile, const Step& step)
      : step_(step) {
    group_ = step.group >> max(p.log2_block_k - 6, 0);
    if (step.kernel_row >= p.shape.kernel.rows) return;
    has_column_[0] = step.kernel_column < p.shape.kernel.columns;
    has_column_[1] = step.kernel_column > 0 && tile.box(2).column < p.shape.output.columns;
    if (!has_column_[0]) {  // the same pixels, as the second column sees them
      --step_.kernel_column;
      --step_.position;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const Box box = tile.box(has_column_[0] ? i : 2 + i);
      has_box_[i] = box.image < p.shape.output.images;
      const bool exists = has_box_[i] && (has_column_[0] || has_column_[1]);
      boxes_[i] = BoxNorms(p, exists ? box : Box{});
    }
  }

  // Bit 2 * column + box.
  __device__ uint16_t mask(const ConvParams& p, float tau) const {
    if (!has_column_[0] && !has_column_[1]) return 0;
    float weights[2], boxes[2];
    const float* weight = p.norm_weight + step_.position * p.norm_groups + group_;
    weights[0] = has_column_[0] ? weight[0] : 0;
    weights[1] = has_column_[1] ? weight[has_column_[0] ? -p.norm_groups : 0] : 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) boxes[i] = has_box_[i] ? boxes_[i].at(p, step_, group_) : 0;
    uint16_t bits = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float skip_norm = norm_product(boxes[i % 2], boxes_[i % 2].scale());
      const bool needed =
          has_column_[i / 2] && has_box_[i % 2] && is_needed(weights[i / 2], skip_norm, tau);
      bits |= static_cast<uint16_t>(needed) << i;
    }
    return bits;
  }

 private:
  Step step_;
  BoxNorms boxes_[2];
  int group_;
  bool has_column_[2] = {false, false}, has_box_[2] = {false, false};
};

template <class Config>
__device__ void list_resident_steps(const ConvParams& p, ResidentStorage<Config>& storage) {
  const Step step = resident_step_at(p, threadIdx.x % 32);
  float tau = 0;
  ListWriter<Config, ResidentStorage<Config>> writer(storage);
  bool waited = false;
  for (int number = blockIdx.x; number < p.tiles; number = claim_tile(p, number)) {
    const auto tile = resident_tile_at<Config>(p, number);
    const ResidentNorms<Config> norms(p, tile, step);
    if (!waited) {
      wait_for_previous_kernel();
      wait_for_barriers();
      tau = p.tau.value();
      waited = true;
    }
    Step of_tile = step;
    of_tile.mask = norms.mask(p, tau);
    writer.append(tile, of_tile);
    writer.end_tile(tile);
    writer.wait_for_room();
  }
  writer.end_work();
}

// One thread's work.
template <class Config>
__device__ void load_resident_weights(const ConvParams& p, ResidentStorage<Config>& storage) {
  if (!p.weight_is_ready) wait_for_previous_kernel();
  const int positions = p.shape.kernel.rows * p.shape.kernel.columns;
#pragma unroll 1
  for (int position = 0; position < positions; ++position) {
    for (int group = 0; group < p.box_groups; ++group) {
      const int number = group * positions + position;
      Barrier& full = storage.weight_full[number];
      full.arrive_and_expect_tx(sizeof(OperandBlock));
      cute::SM90_TMA_LOAD_3D::copy(&p.map_weight, reinterpret_cast<uint64_t*>(&full), kCacheHint,
                                   &storage.weights[number], group * kBlock, position, 0);
    }
  }
  // Their memory must not be given up before.
  for (int i = 0; i < positions * p.box_groups; ++i) storage.weight_full[i].wait(0);
}

// One thread's work.
template <class Config>
__device__ void load_resident_pixels(const ConvParams& p, ResidentStorage<Config>& storage) {
  const int positions = p.shape.kernel.rows * p.shape.kernel.columns;
  RingPosition<Config::kLists> from;
  RingPosition<Config::kStages> at;
  const auto announce = [&](uint32_t notice, uint32_t bytes) {
    storage.empty[at.slot].wait(at.phase ^ 1);
    storage.notices[at.slot] = notice;
    if (notice & kEndsTile) storage.tiles[at.slot] = storage.lists[from.slot].tile;
    storage.full[at.slot].arrive_and_expect_tx(bytes);
  };
  while (true) {
    storage.list_full[from.slot].wait(from.phase);
    const auto& list = storage.lists[from.slot];
    if (list.ends_work) break;
    const Box box = list.tile.first;
    const int row = box.row * p.shape.stride.rows - p.shape.padding.rows;
    const int column = box.column - p.shape.padding.columns, count = list.count;
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      const Step step = list.steps[i];
      const uint32_t needed = step.mask | step.mask >> 2;
      const uint32_t weight = step.group * positions + step.position;
      announce(step.mask | weight << kWeightShift | (i == count - 1 ? kEndsTile : 0),
               bytes_of_boxes<Config, 2>(needed));
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        if ((needed >> b & 1) == 0) continue;
        cute::SM90_TMA_LOAD_4D::copy(
            &map_of_box<Config>(p, b), reinterpret_cast<uint64_t*>(&storage.full[at.slot]),
            kCacheHint, &storage.stages[at.slot].pixels[b], step.group * kBlock,
            column + step.kernel_column, row + step.kernel_row * p.shape.dilation.rows,
            box.image + b * kBlock);
      }
      at.advance();
    }
    if (count == 0) {
      announce(kEndsTile, 0);
      at.advance();
    }
    storage.list_empty[from.slot].arrive();
    from.advance();
  }
  announce(kEndsWork, 0);
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    conv_resident_sm90(const __grid_constant__ ConvParams p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) uint8_t shared[];
  auto& storage = *reinterpret_cast<ResidentStorage<Config>*>(shared);
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
    multiply_stages<Config, ResidentOperands<Config>>(p, warp / 4 - 1, storage);
  } else if (warp == kListWarp) {
    list_resident_steps<Config>(p, storage);
  } else if (warp == 1 && elected) {
    load_resident_pixels<Config>(p, storage);
  } else if (warp == 0 && elected) {
    load_resident_weights<Config>(p, storage);
  }
#else
  __trap();  // compiled for another target: fail, do not leave the output unwritten
#endif
}

}  // namespace spamm::kernels::conv
