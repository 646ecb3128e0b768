// The kernel of deviations (deviation.cuh) by strips: 3 x 3 kernels with stride 1, half types,
// pixel blocks (1, 8, 8), where zeros alone are skipped. A step is one kernel column of one channel
// group, in all three kernel rows. The boxes of a warpgroup lie one above the other. Sums go by
// channel group, then kernel column, then kernel row.
//
// Whether a box is zero at a kernel position tells one look at the norms of the pixels that it sees
// there. So the norms of a strip's 18 x 10 pixels, all kernel columns of it, are read once for each
// channel group, and no norms of blocks are computed before.
#pragma once

#include "kernels/reference/sm90/deviation.cuh"

namespace spamm::kernels::reference {

template <class Element, int kRows, int kBoxes, int kStages>
struct StripConfig : DeviationConfig<Element, kRows, kBoxes, kStages> {
  static_assert(kRows * kBoxes == 4);  // a mask has a bit for each output block and kernel row
  static constexpr int kKernelRows = 3;
};

// What two boxes of 8 x 8 pixels, one above the other, read at one kernel column in three kernel
// rows: 18 rows of 8 pixels. A row of pixels is 8 lines, as many as the swizzle repeats after. So
// kernel row r of both boxes is a row of operand blocks that starts r pixel rows further on.
struct alignas(1024) Strip {
  static constexpr int kPixelRows = 18, kColumns = 8, kRowBytes = kColumns * kLineBytes;

  OperandBlock boxes[2];
  uint8_t below[2 * kRowBytes];
};
static_assert(sizeof(Strip) == Strip::kPixelRows * Strip::kRowBytes);

template <class Config>
struct StripBlocks {
  struct Stage {
    OperandBlock weight[Config::kKernelRows][Config::kRows];
    Strip strips[Config::kBoxes / 2];

    __device__ OperandBlock& weight_of(int row) { return weight[0][row]; }
    __device__ OperandBlock& box(int i) { return strips[i / 2].boxes[i % 2]; }
  };
  Stage stages[Config::kStages];
  StagedBox<Config> output[Config::kWarpgroups];
};

template <class Config>
using StripStorage = DeviationStorage<Config, StripBlocks<Config>>;

// ---- The list warp ------------------------------------------------------------------------------

// Computes the masks of a tile's steps from the norms of the pixels.
template <class Config>
class StripNorms {
  static constexpr int kRows = Config::kRows, kBoxes = Config::kBoxes;

 public:
  static constexpr int kStrips = kBoxes / 2, kKernelColumns = 3;
  static constexpr int kColumns = Strip::kColumns + kKernelColumns - 1;
  static constexpr int kOutputBlocks = kRows * kBoxes;

  __device__ StripNorms(const DeviationParams& p, const Tile<Config>& tile) {
    const int lane = threadIdx.x % 32;
    uint32_t exists = 0;
#pragma unroll
    for (int i = 0; i < kStrips; ++i) {
      const Box& box = tile.boxes[2 * i];
      const bool strip_exists = box.image < p.shape.output.images;
      const bool has_second = tile.boxes[2 * i + 1].row < p.shape.output.rows;
      if (strip_exists) exists |= (has_second ? 3u : 1u) << 2 * i;
      const int row = box.row - p.shape.padding.rows + lane;
      const bool has_row = strip_exists && lane < Strip::kPixelRows &&
                           static_cast<unsigned>(row) < p.shape.input.rows;
      // A row without pixels has no column that exists.
      columns_[i] = has_row ? box.column - p.shape.padding.columns : p.shape.input.columns;
      rows_[i] = has_row ? (box.image * p.shape.input.rows + row) * p.shape.input.columns : 0;
    }
    const int positions = p.shape.kernel.rows * p.shape.kernel.columns;
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      const int channel = tile.channel + row * kBlock;
      const bool row_exists = channel < p.shape.out_channels;
      if (row_exists) inside_ |= exists << (row * kBoxes);
      weights_[row] = static_cast<int64_t>(row_exists ? channel >> p.log2_block_m : 0) * positions *
                      p.norm_groups;
    }
  }

  // The norms of the lane's row of each strip: lane r has row r.
  struct Row {
    float norms[kStrips][kColumns];
  };
  __device__ __forceinline__ Row load(const DeviationParams& p, int group, bool exists) const {
    Row found;
    const float* from = p.norm_input.norms;
    int groups = p.norm_groups - (p.second.channels + kBlock - 1) / kBlock;
    if (group >= groups) {
      from = p.second.norms;
      group -= groups;
      groups = p.norm_groups - groups;
    }
#pragma unroll
    for (int i = 0; i < kStrips; ++i) {
#pragma unroll
      for (int x = 0; x < kColumns; ++x) {
        const int column = columns_[i] + x;
        const bool inside = exists && static_cast<unsigned>(column) < p.shape.input.columns;
        const auto pixel = static_cast<int64_t>(rows_[i]) + column;
        found.norms[i][x] = inside ? from[pixel * groups + group] : 0;
      }
    }
    return found;
  }

  // Bit r of live.rows[i]: whether what row r of strip i has at a kernel column is not all zero.
  // live.odd: whether NaN or infinity is among the strips' norms.
  struct LiveRows {
    uint32_t rows[kStrips];
    bool odd;
  };
  // All lanes call it together; each gets that of its own kernel column.
  __device__ __forceinline__ LiveRows live_rows(const Row& found, int kernel_column) const {
    LiveRows live;
    bool odd = false;
#pragma unroll
    for (int i = 0; i < kStrips; ++i) {
      uint32_t nonzero = 0;
#pragma unroll
      for (int x = 0; x < kColumns; ++x) {
        nonzero |= static_cast<uint32_t>(found.norms[i][x] != 0) << x;  // NaN is not zero
        odd |= !(found.norms[i][x] < INFINITY);
      }
#pragma unroll
      for (int column = 0; column < kKernelColumns; ++column) {
        const uint32_t seen = nonzero >> column & ((1u << Strip::kColumns) - 1);
        const uint32_t rows = __ballot_sync(~0u, seen != 0);
        if (column == kernel_column) live.rows[i] = rows;
      }
    }
    live.odd = __any_sync(~0u, odd);
    return live;
  }

  struct Weights {
    float norms[Config::kKernelRows][kRows];
  };
  __device__ __forceinline__ Weights weights(const DeviationParams& p, int group,
                                             int kernel_column) const {
    Weights found;
#pragma unroll
    for (int kernel_row = 0; kernel_row < Config::kKernelRows; ++kernel_row) {
      const int position = kernel_row * kKernelColumns + kernel_column;
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        found.norms[kernel_row][row] =
            weight_norm(p, weights_[row] + position * p.norm_groups + group);
      }
    }
    return found;
  }

  __device__ uint32_t mask(const Weights& weights, const LiveRows& live, float tau) const {
    // Any norm that is not zero will do for a tau that skips zeros alone. But a weight of zeros may
    // be skipped for finite pixels only: as elsewhere, NaN keeps the product.
    const float norm_of_seen = live.odd ? NAN : 1.0f;
    uint32_t bits = 0;
#pragma unroll
    for (int kernel_row = 0; kernel_row < Config::kKernelRows; ++kernel_row) {
      uint32_t of_kernel_row = 0;
#pragma unroll
      for (int box = 0; box < kBoxes; ++box) {
        const uint32_t seen = live.rows[box / 2] >> (kernel_row + box % 2 * 8) & 0xff;
#pragma unroll
        for (int row = 0; row < kRows; ++row) {
          const bool needed =
              is_valid_im2col(weights.norms[kernel_row][row], seen != 0 ? norm_of_seen : 0.0f, tau);
          of_kernel_row |= static_cast<uint32_t>(needed) << (row * kBoxes + box);
        }
      }
      bits |= (of_kernel_row & inside_) << (kernel_row * kOutputBlocks);
    }
    return bits;
  }

  // The bits of one row's output blocks.
  __device__ uint32_t inside(int row) const {
    return inside_ & ((1u << kBoxes) - 1) << (row * kBoxes);
  }

 private:
  int columns_[kStrips], rows_[kStrips];  // the first column; the pixels before the lane's row
  int64_t weights_[kRows];                // the numbers of their first norms
  uint32_t inside_ = 0;
};

// Lists the valid steps of a tile. A lane has one kernel column of a channel group.
template <class Config>
__device__ __forceinline__ uint32_t list_strips(const DeviationParams& p, const Tile<Config>& tile,
                                                const StripNorms<Config>& norms, float tau,
                                                ListWriter<Config>& writer) {
  using Norms = StripNorms<Config>;
  constexpr int kLaneGroups = 32 / Norms::kKernelColumns;
  constexpr int kInFlight = 2 / Norms::kStrips;  // groups whose norms are loaded together
  const int lane = threadIdx.x % 32, kernel_column = lane % Norms::kKernelColumns;
  uint32_t used = 0;
#pragma unroll 1
  for (int first = 0; first < p.box_groups; first += kLaneGroups) {
    const int count = min(kLaneGroups, p.box_groups - first);
    const int of_lane = lane / Norms::kKernelColumns;
    const int group = first + min(of_lane, count - 1);
    const auto weights = norms.weights(p, group, kernel_column);
    typename Norms::LiveRows live{};
#pragma unroll 1
    for (int i = 0; i < count; i += kInFlight) {
      typename Norms::Row found[kInFlight];
#pragma unroll
      for (int j = 0; j < kInFlight; ++j) {
        found[j] = norms.load(p, first + i + j, i + j < count);
      }
#pragma unroll
      for (int j = 0; j < kInFlight; ++j) {
        const auto of_group = norms.live_rows(found[j], kernel_column);
        if (i + j == of_lane) live = of_group;
      }
    }
    Step step{0, static_cast<uint16_t>(group), 0, static_cast<uint8_t>(kernel_column),
              static_cast<uint16_t>(kernel_column)};
    if (of_lane < count) step.mask = static_cast<uint16_t>(norms.mask(weights, live, tau));
#pragma unroll
    for (int row = 0; row < Config::kKernelRows; ++row) {
      used |= step.mask >> (row * Norms::kOutputBlocks) & ((1u << Norms::kOutputBlocks) - 1);
    }
    writer.append(tile, step);
  }
  return used;
}

template <class Config>
struct StripList : DeviationList<Config> {
  using Norms = StripNorms<Config>;

  // The tile with pairs of boxes, one above the other. by_box_rows divides by the number of pairs.
  __device__ __forceinline__ static Tile<Config> tile_at(const DeviationParams& p, int number) {
    int pairs, channels;
    p.by_channel_tiles(pairs, channels, number);
    Tile<Config> tile;
    tile.channel = channels * Config::kRows * kBlock;
#pragma unroll
    for (int i = 0; i < Config::kBoxes; i += 2) {
      Box box = box_at(p, pairs * (Config::kBoxes / 2) + i / 2);
      box.row *= 2;
      tile.boxes[i] = box;
      tile.boxes[i + 1] = {box.image, box.row + (1 << p.box.rows), box.column};
    }
    return tile;
  }

  __device__ __forceinline__ static void list(const DeviationParams& p, const Tile<Config>& tile,
                                              const Norms& norms, float tau,
                                              ListWriter<Config>& writer) {
    const uint32_t used = list_strips(p, tile, norms, tau, writer);
    list_addends(p, tile, norms, used, writer);
  }
};

// ---- The load warps -----------------------------------------------------------------------------

template <class Config, bool kWeights>
class StripLoader : public DeviationLoader<Config, kWeights, StripStorage<Config>> {
 public:
  using DeviationLoader<Config, kWeights, StripStorage<Config>>::DeviationLoader;

  __device__ void load(const Tile<Config>& tile, const Step& step, bool ends_tile) {
    if (!this->loads_addend(tile, step, ends_tile)) load_strips(tile, step, ends_tile);
  }

 private:
  // Fills one stage with the strips of one kernel column, and the weights of the kernel rows for
  // which some output block is valid.
  __device__ __forceinline__ void load_strips(const Tile<Config>& tile, const Step& step,
                                              bool ends_tile) {
    constexpr int kOutputBlocks = Config::kRows * Config::kBoxes;
    constexpr uint32_t kWeightBytes = Config::kRows * sizeof(OperandBlock);
    const auto is_needed = [&](int kernel_row) {
      return (step.mask >> kernel_row * kOutputBlocks & ((1u << kOutputBlocks) - 1)) != 0;
    };
    const uint32_t needed = needed_boxes<Config, Config::kRows * Config::kKernelRows>(step.mask);
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
    auto& stage = this->storage_.stages[this->at_.slot];
    const int channel = step.group * kBlock;
    if constexpr (kWeights) {
#pragma unroll
      for (int row = 0; row < Config::kKernelRows; ++row) {
        if (!is_needed(row)) continue;
        cute::SM90_TMA_LOAD_3D::copy(
            &this->p_.map_weight, barrier, kCacheHint, &stage.weight[row], channel,
            row * this->p_.shape.kernel.columns + step.kernel_column, tile.channel);
      }
    } else {
      const auto load = [&](const CUtensorMap& map, int own_channel) {
#pragma unroll
        for (int i = 0; i < Config::kBoxes / 2; ++i) {
          if ((needed >> 2 * i & 3) == 0) continue;
          const Box& box = tile.boxes[2 * i];
          cute::SM90_TMA_LOAD_4D::copy(
              &map, barrier, kCacheHint, &stage.strips[i], own_channel,
              box.column + step.kernel_column - this->p_.shape.padding.columns,
              box.row - this->p_.shape.padding.rows, box.image);
        }
      };
      const int of_first = this->p_.shape.channels - this->p_.second.channels;
      if (channel < of_first) {
        load(this->p_.map_input, channel);
      } else {
        load(this->p_.map_second, channel - of_first);
      }
    }
    this->at_.advance();
  }
};

// ---- The warpgroups -----------------------------------------------------------------------------

// acc += 64 output channels times two boxes in all kernel rows of a strip. `bits` has those of
// multiply_step() for each kernel row. Calls look_ahead() while products run.
template <class Config, class LookAhead>
__device__ __forceinline__ void multiply_strip(uint32_t bits, uint64_t weight, uint64_t pixels,
                                               float (&acc)[Config::kValues],
                                               const LookAhead& look_ahead) {
  using Operand = typename Config::Operand;
  using kernels::sm90::kDescriptorUnit;
  constexpr auto kK = kernels::sm90::Major::K;
  constexpr int kDepth = kLineBytes / sizeof(Operand);
  constexpr uint32_t kNextWeight = Config::kRows * sizeof(OperandBlock) / kDescriptorUnit;
  constexpr uint32_t kNextPixels = Strip::kRowBytes / kDescriptorUnit;
  constexpr uint32_t kAll = (1u << 2 * Config::kKernelRows) - 1;
  if (bits == kAll) {  // one wait for all kernel rows
    float wide[Config::kValues];
    kernels::sm90::hand_over<Config::kValues>(acc, wide);
    cute::warpgroup_arrive();
#pragma unroll
    for (int row = 0; row < Config::kKernelRows; ++row) {
      kernels::sm90::multiply_columns<Operand, kK, kK, 0, 2 * kBlock, 0, kDepth>(
          kernels::sm90::advance(weight, row * kNextWeight),
          kernels::sm90::advance(pixels, row * kNextPixels), wide);
    }
    cute::warpgroup_commit_batch();
    look_ahead();
    cute::warpgroup_wait<0>();
    kernels::sm90::hand_over<Config::kValues>(wide, acc);
    return;
  }
#pragma unroll 1
  for (; bits != 0; bits >>= 2) {
    if ((bits & 3) != 0) multiply_step<Config>(bits & 3, weight, pixels, acc, [] {});
    weight = kernels::sm90::advance(weight, kNextWeight);
    pixels = kernels::sm90::advance(pixels, kNextPixels);
  }
  look_ahead();
}

template <class Config>
class StripWork : public DeviationWork<Config> {
 public:
  using DeviationWork<Config>::DeviationWork;

  // The bits of a warpgroup's two boxes, of each kernel row of the step.
  __device__ __forceinline__ uint32_t bits_of(const Notice& notice, int warpgroup) {
    uint32_t bits = notice.mask(warpgroup);
#pragma unroll
    for (int row = 1; row < Config::kKernelRows; ++row) {
      bits |= notice.mask(row * Config::kWarpgroups + warpgroup) << 2 * row;
    }
#pragma unroll
    for (int row = 0; row < Config::kKernelRows; ++row) this->computed_ |= bits >> 2 * row & 3;
    this->computed_ |= notice.brought_mask(warpgroup);
    return bits;
  }

  template <class LookAhead>
  __device__ __forceinline__ void multiply(uint32_t bits, uint64_t weight, uint64_t pixels,
                                           float (&acc)[Config::kValues],
                                           const LookAhead& look_ahead) {
    multiply_strip<Config>(bits, weight, pixels, acc, look_ahead);
  }
};

template <class Config_>
struct StripKernel : BoxKernel<Config_> {
  using Storage = StripStorage<Config_>;
  template <bool kWeights>
  using Loader = StripLoader<Config_, kWeights>;
  using List = StripList<Config_>;
  using Operands = StagedOperands<Config_, Storage>;
  using Work = StripWork<Config_>;
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    strip_conv_sm90(const __grid_constant__ DeviationParams p) {
  run<ConvRoles<StripKernel<Config>>>(p);
}

}  // namespace spamm::kernels::reference
