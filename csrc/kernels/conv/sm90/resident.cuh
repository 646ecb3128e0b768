// The Hopper convolution (conv.cuh) for few output channels. All weights stay in shared memory.
//
// A tile is all channels of two neighbouring output columns x two boxes of 64 images. Each
// warpgroup computes one column. A step is one input pixel and channel group in both boxes. It
// serves one kernel position of the first column, and the kernel position before it of the second.
// So a 3 x 3 kernel reads 12 operand blocks for 18 products. The weights are loaded before any norm
// is read. Results have the same bits as those of conv.cuh. Limits: takes_resident().
#pragma once

#include "kernels/conv/sm90/conv.cuh"

namespace spamm::kernels::conv::sm90 {

// kRowsInTurn: tiles of a number, in rows of the output that follow each other.
template <class Element, int kLastWidth, int kRowsInTurn_ = 1>
struct ResidentConfig : Config<Element, 1, 4, kLastWidth, 4> {
  static constexpr int kListCapacity = 32;  // all steps of a tile
  static constexpr bool kAddsResidual = false;
  static constexpr int kRowsInTurn = kRowsInTurn_;
};

// Stores only the first box, to save shared memory: thread blocks of the norm kernel have to fit
// beside this kernel.
template <class Element, int kLastWidth, int kRowsInTurn>
struct Tile<ResidentConfig<Element, kLastWidth, kRowsInTurn>> {
  static constexpr int channel = 0;
  Box first;

  // Images are the fastest index, then columns.
  __device__ Box box(int i) const {
    return {first.image + i % 2 * kBlock, first.row, first.column + i / 2};
  }
};

template <class Config>
struct ResidentStorage {
  struct Stage {
    OperandBlock pixels[2];
  };

  OperandBlock weights[kResidentBlocks];  // [channel group][kernel position]
  Stage stages[Config::kStages];
  OperandBlock output[Config::kWarpgroups];
  BoxSquares<typename Config::Element> squares[Config::kWarpgroups];
  RingOf<Config> ring;
  Barrier weight_full[kResidentBlocks];

  __device__ void initialize() {
    ring.initialize(1, 4 * Config::kWarpgroups);
    for (Barrier& barrier : weight_full) barrier.init(1);
    cutlass::arch::fence_barrier_init();
  }
};

// Finds the operands of a step for the warpgroup of a column.
template <class Config>
class ResidentOperands {
 public:
  __device__ ResidentOperands(ResidentStorage<Config>& storage, int column)
      : storage_(storage),
        weights_(kernels::sm90::descriptor<kernels::sm90::Major::K>(storage.weights[0])),
        pixels_(storage.stages[0].pixels[0]),
        column_(column) {}

  // Waits until the weights have arrived.
  __device__ uint64_t weight(Notice notice) const {
    const uint32_t number = notice.weight() - column_;
    storage_.weight_full[number].wait(0);
    return kernels::sm90::advance(weights_,
                                  number * (sizeof(OperandBlock) / kernels::sm90::kDescriptorUnit));
  }
  __device__ uint64_t pixels() const { return *pixels_; }
  __device__ void advance(bool to_first) { pixels_.advance(to_first); }

 private:
  ResidentStorage<Config>& storage_;
  uint64_t weights_;
  Descriptor<Config, typename ResidentStorage<Config>::Stage> pixels_;
  int column_;
};

// The first of the tiles of this number.
template <class Config>
__device__ Tile<Config> resident_tile_at(const ConvParams& p, int number) {
  int pair, row, images;
  p.by_box_columns(number, pair, number);
  p.by_box_rows(images, row, number);
  return {{images * 2 * kBlock, row * Config::kRowsInTurn, pair * 2}};
}

// The step of a lane, in the windows of both columns together. Its kernel position is that of the
// first column, as if the kernel had one more column.
__device__ inline Step resident_step_at(const ConvParams& p, int number) {
  const int columns = p.shape.kernel.columns + 1;
  const int group = number % p.box_groups, row = number / p.box_groups / columns;
  const int column = number / p.box_groups % columns;
  return {0, static_cast<uint16_t>(group), static_cast<uint8_t>(row), static_cast<uint8_t>(column),
          static_cast<uint16_t>(row * p.shape.kernel.columns + column)};
}

// Computes the mask of a lane's step.
template <class Config>
class ResidentNorms {
 public:
  // Does not read memory, so it may run before the previous kernel has ended.
  __device__ ResidentNorms(const ConvParams& p, const Tile<Config>& tile, const Step& step)
      : step_(step) {
    group_ = step.group >> max(p.log2_block_k - 6, 0);
    if (step.kernel_row >= p.shape.kernel.rows) return;
    has_column_[0] = step.kernel_column < p.shape.kernel.columns;
    has_column_[1] = step.kernel_column > 0 && tile.box(2).column < p.shape.output.columns;
    if (!has_column_[0]) {  // only the second column: use its kernel position
      --step_.kernel_column;
      --step_.kernel_position;
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
    const int index = step_.kernel_position * p.norm_groups + group_;
    weights[0] = has_column_[0] ? weight_norm(p, index) : 0;
    weights[1] = has_column_[1] ? weight_norm(p, index - (has_column_[0] ? p.norm_groups : 0)) : 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) boxes[i] = has_box_[i] ? boxes_[i].at(p, step_, group_) : 0;
    uint16_t bits = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float skip_norm = norm_product(boxes[i % 2], boxes_[i % 2].scale());
      const bool needed =
          has_column_[i / 2] && has_box_[i % 2] && is_valid_im2col(weights[i / 2], skip_norm, tau);
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
  ListWriter<Config> writer(storage.ring);
  bool waited = false;
  for (int number = blockIdx.x; number < p.tiles; number = claim_tile(p, number)) {
    auto tile = resident_tile_at<Config>(p, number);
#pragma unroll 1
    for (int i = 0; i < Config::kRowsInTurn; ++i, ++tile.first.row) {
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
  }
  writer.end_work();
}

// Loads all weights. Called by one thread.
template <class Config>
__device__ void load_resident_weights(const ConvParams& p, ResidentStorage<Config>& storage) {
  wait_for_previous_kernel();
  const int positions = p.shape.kernel.rows * p.shape.kernel.columns;
#pragma unroll 1
  for (int kernel_position = 0; kernel_position < positions; ++kernel_position) {
    for (int group = 0; group < p.box_groups; ++group) {
      const int number = group * positions + kernel_position;
      Barrier& full = storage.weight_full[number];
      full.arrive_and_expect_tx(sizeof(OperandBlock));
      cute::SM90_TMA_LOAD_3D::copy(&p.map_weight, reinterpret_cast<uint64_t*>(&full), kCacheHint,
                                   &storage.weights[number], group * kBlock, kernel_position, 0);
    }
  }
  // The thread block must not end, and free its shared memory, while loads are in flight.
  for (int i = 0; i < positions * p.box_groups; ++i) storage.weight_full[i].wait(0);
}

// Loads the pixels.
template <class Config>
class ResidentLoader : public StageWriter<Config, true> {
  using Base = StageWriter<Config, true>;
  using Base::at_;

 public:
  __device__ ResidentLoader(const ConvParams& p, ResidentStorage<Config>& storage)
      : Base(storage.ring), p_(p), storage_(storage) {}

  __device__ void load(const Tile<Config>& tile, const Step& step, bool ends_tile) {
    const Box& box = tile.first;
    const int row = box.row * p_.shape.stride.rows - p_.shape.padding.rows;
    const int column = box.column - p_.shape.padding.columns;
    const int positions = p_.shape.kernel.rows * p_.shape.kernel.columns;
    const uint32_t needed = step.mask | step.mask >> 2;
    const uint32_t weight = step.group * positions + step.kernel_position;
    this->announce(Notice::of(step.mask, ends_tile, weight), tile,
                   bytes_of_boxes<Config, 2>(needed));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if ((needed >> i & 1) == 0) continue;
      cute::SM90_TMA_LOAD_4D::copy(
          &map_of_box<Config>(p_, i), reinterpret_cast<uint64_t*>(&this->full()), kCacheHint,
          &storage_.stages[at_.slot].pixels[i], step.group * kBlock, column + step.kernel_column,
          row + step.kernel_row * p_.shape.dilation.rows, box.image + i * kBlock);
    }
    at_.advance();
  }

 private:
  const ConvParams& p_;
  ResidentStorage<Config>& storage_;
};

template <class Config_, class Work_>
struct ResidentKernel {
  using Config = Config_;
  using Storage = ResidentStorage<Config>;
  template <bool>
  using Loader = ResidentLoader<Config>;
  using Operands = ResidentOperands<Config>;
  using Work = Work_;
};

template <class Config, class Work>
struct ResidentRoles : ConvRoles<ResidentKernel<Config, Work>> {
  __device__ __forceinline__ void load_a() const {
    load_resident_weights<Config>(this->p, this->storage);
  }
  __device__ __forceinline__ void list(int) const {
    list_resident_steps<Config>(this->p, this->storage);
  }
};

template <class Config, class Work>
__global__ void __launch_bounds__(Config::kThreads, 1)
    conv_resident_sm90(const __grid_constant__ ConvParams p) {
  run<ResidentRoles<Config, Work>>(p);
}

}  // namespace spamm::kernels::conv::sm90
