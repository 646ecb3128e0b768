// The list warp of the Hopper convolution of deviations by strips, where zeros alone are skipped.
//
// Whether a box is zero at a kernel position tells one look at the norms of the pixels that it sees
// there. So the norms of a strip's 18 x 10 pixels, all kernel columns of it, are read once for each
// channel group, and no norms of blocks are computed before.
#pragma once

#include "kernels/conv/sm90/list.cuh"

namespace spamm::kernels::conv::sm90 {

// Computes the masks of a tile's steps from the norms of the pixels.
template <class Element, int kRows, int kBoxes, int kStages>
class TileNorms<StripConfig<Element, kRows, kBoxes, kStages>> {
  using Config = StripConfig<Element, kRows, kBoxes, kStages>;

 public:
  static constexpr int kStrips = kBoxes / 2, kKernelColumns = 3;
  static constexpr int kColumns = Strip::kColumns + kKernelColumns - 1;
  static constexpr int kOutputBlocks = kRows * kBoxes;

  __device__ TileNorms(const ConvParams& p, const Tile<Config>& tile) {
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
  __device__ __forceinline__ Row load(const ConvParams& p, int group, bool exists) const {
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
  __device__ __forceinline__ Weights weights(const ConvParams& p, int group,
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

// A lane has one kernel column of a channel group.
template <class Config>
requires Config::kStrips __device__ __forceinline__ uint32_t
list_valid_steps(const ConvParams& p, const Tile<Config>& tile, const TileNorms<Config>& norms,
                 float tau, ListWriter<Config>& writer) {
  using Norms = TileNorms<Config>;
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

}  // namespace spamm::kernels::conv::sm90
