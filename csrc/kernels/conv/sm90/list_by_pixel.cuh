// The list warp of the Hopper convolution where each pixel of a box is judged by itself: small
// batches whose pixel blocks are one pixel of more images than there are.
#pragma once

#include "kernels/conv/sm90/list.cuh"

namespace spamm::kernels::conv::sm90 {

// Computes the pixels of a tile's steps from the norms. All images are in one block.
template <class Element, int kRows, int kBoxes, int kStages>
class TileNorms<ConfigByPixel<Element, kRows, kBoxes, kStages>> {
  using Config = ConfigByPixel<Element, kRows, kBoxes, kStages>;

 public:
  __device__ TileNorms(const ConvParams& p, const Tile<Config>& tile)
      : tile_(tile),
        scale_(skip_norm_scale(p, Box{})),
        columns_(p.box.columns),
        count_(1 << (p.box.rows + p.box.columns)) {
    const int positions = p.shape.kernel.rows * p.shape.kernel.columns;
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      const int channel = tile.channel + row * kBlock;
      has_row_[row] = channel < p.shape.out_channels;
      weights_[row] = static_cast<int64_t>(has_row_[row] ? channel >> p.log2_block_m : 0) *
                      positions * p.norm_groups;
    }
#pragma unroll
    for (int i = 0; i < kBoxes; ++i) existing_[i] = existing_pixels(p, tile.boxes[i]);
  }

  // Fills in the mask and the pixels of a step. `lanes` neighbouring lanes share the pixels, at
  // most kOfLane each; all get the result. Their loads are all in flight at once.
  static constexpr int kOfLane = 8;
  __device__ void judge(const ConvParams& p, float tau, int lanes, StepOf<Config>& step) const {
    const int group = step.group >> max(p.log2_block_k - 6, 0);
    const int index = step.kernel_position * p.norm_groups + group;
    const int each = count_ / lanes, first = threadIdx.x % lanes * each;
    float weights[kRows], norms[kBoxes][kOfLane];
#pragma unroll
    for (int row = 0; row < kRows; ++row) weights[row] = weight_norm(p, weights_[row] + index);
#pragma unroll
    for (int i = 0; i < kBoxes; ++i) {
#pragma unroll
      for (int j = 0; j < kOfLane; ++j) {
        norms[i][j] = j < each ? norm(p, tile_.boxes[i], step, group, first + j) : 0;
      }
    }
    step.is_mixed = false;
#pragma unroll
    for (int i = 0; i < kBoxes; ++i) {
      // Pixels of zeros add nothing, so a step does not become mixed by them.
      const uint64_t zeros = of_box(lanes, each, [&](int j) { return norms[i][j] == 0; });
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        const uint64_t valid = of_box(lanes, each, [&](int j) {
          return is_valid_im2col(weights[row], norm_product(norms[i][j], scale_), tau);
        });
        const uint64_t pixels = has_row_[row] ? valid & existing_[i] : 0;
        const int block = row * kBoxes + i;
        step.pixels[block] = pixels;
        step.mask |= static_cast<uint16_t>(pixels != 0) << block;
        step.is_mixed |= pixels != 0 && (existing_[i] & ~(pixels | zeros)) != 0;
      }
    }
  }

  // How many lanes share a step: enough for all its pixels, and more if there are few steps.
  __device__ int lanes_of_step(const ConvParams& p) const {
    int lanes = max(count_ / kOfLane, 1);
    while (2 * lanes <= min(count_, 32) && 32 / (2 * lanes) >= p.steps) lanes *= 2;
    return lanes;
  }

  // The bits of one row's output blocks.
  __device__ uint32_t inside(int row) const {
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < kRows * kBoxes; ++i) {
      const bool is = i / kBoxes == row && has_row_[i / kBoxes] && existing_[i % kBoxes] != 0;
      bits |= static_cast<uint32_t>(is) << i;
    }
    return bits;
  }

 private:
  // Bit i: test(i) of a box's pixels, of which each of `lanes` lanes has `each`.
  template <class Test>
  __device__ __forceinline__ static uint64_t of_box(int lanes, int each, const Test& test) {
    uint32_t of_lane = 0;
#pragma unroll
    for (int j = 0; j < kOfLane; ++j) of_lane |= static_cast<uint32_t>(j < each && test(j)) << j;
    uint64_t bits = static_cast<uint64_t>(of_lane) << (threadIdx.x % lanes * each);
    for (int distance = lanes / 2; distance > 0; distance /= 2) {
      bits |= __shfl_xor_sync(~0u, bits, distance);
    }
    return bits;
  }

  // The pixels of a box that are in the output.
  __device__ uint64_t existing_pixels(const ConvParams& p, const Box& box) const {
    uint64_t pixels = 0;
    if (box.image >= p.shape.output.images) return 0;
    for (int i = 0; i < count_; ++i) {
      const bool is = box.row + row_of(i) < p.shape.output.rows &&
                      box.column + column_of(i) < p.shape.output.columns;
      pixels |= static_cast<uint64_t>(is) << i;
    }
    return pixels;
  }

  // The norm that output pixel i of a box meets at a step. 0 in the padding.
  __device__ float norm(const ConvParams& p, const Box& box, const Step& step, int group,
                        int i) const {
    const int row = (box.row + row_of(i)) * p.shape.stride.rows - p.shape.padding.rows +
                    step.kernel_row * p.shape.dilation.rows;
    const int column = (box.column + column_of(i)) * p.shape.stride.columns -
                       p.shape.padding.columns + step.kernel_column * p.shape.dilation.columns;
    const bool inside = i < count_ && static_cast<unsigned>(row) < p.shape.input.rows &&
                        static_cast<unsigned>(column) < p.shape.input.columns;
    if (!inside) return 0;
    return p.norm_input.norms[(row * p.shape.input.columns + column) * p.norm_groups + group];
  }

  // Columns are the fastest index of a box, then rows.
  __device__ int row_of(int i) const { return i >> columns_; }
  __device__ int column_of(int i) const { return i & ((1 << columns_) - 1); }

  const Tile<Config>& tile_;
  float scale_;
  int columns_, count_;
  bool has_row_[kRows];
  int64_t weights_[kRows];  // the numbers of their first norms
  uint64_t existing_[kBoxes];
};

template <class Element, int kRows, int kBoxes, int kStages,
          class Config = ConfigByPixel<Element, kRows, kBoxes, kStages>>
__device__ __forceinline__ void list_valid_steps(
    const ConvParams& p, const Tile<ConfigByPixel<Element, kRows, kBoxes, kStages>>& tile,
    const TileNorms<ConfigByPixel<Element, kRows, kBoxes, kStages>>& norms, float tau,
    ListWriter<ConfigByPixel<Element, kRows, kBoxes, kStages>>& writer) {
  const int lanes = norms.lanes_of_step(p);
  for (int first = 0; first < p.steps; first += 32 / lanes) {
    const int number = first + threadIdx.x % 32 / lanes;
    StepOf<Config> step{step_at(p, min(number, p.steps - 1))};
    norms.judge(p, tau, lanes, step);
    if (number >= p.steps || threadIdx.x % lanes != 0) step.mask = 0;
    writer.append(tile, step);
  }
}

}  // namespace spamm::kernels::conv::sm90
