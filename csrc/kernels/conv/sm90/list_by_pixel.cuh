// The list warp of the Hopper convolution where each pixel of a box is judged by itself: small
// batches whose pixel blocks are one pixel of more images than there are.
#pragma once

#include "kernels/conv/sm90/list.cuh"

namespace spamm::kernels::conv::sm90 {

// Computes the pixels of a tile's steps from the norms. All images are in one block.
template <class Config>
requires Config::kByPixel class TileNorms<Config> {
  static constexpr int kRows = Config::kRows, kBoxes = Config::kBoxes;

 public:
  __device__ TileNorms(const ConvParams& p, const Tile<Config>& tile)
      : scale_(skip_norm_scale(p, Box{})), count_(1 << (p.box.rows + p.box.columns)) {
    lanes_ = max(count_ / kOfLane, 1);
    const int steps = steps_of_block<Config>(p);
    while (2 * lanes_ <= min(count_, 32) && 32 / (2 * lanes_) >= steps) lanes_ *= 2;
    each_ = count_ / lanes_;
    first_ = threadIdx.x % lanes_ * each_;
    sharing_ = ~0u >> (32 - lanes_) << (threadIdx.x % 32 / lanes_ * lanes_);
    const int positions = p.shape.kernel.rows * p.shape.kernel.columns;
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      const int channel = tile.channel + row * kBlock;
      has_row_[row] = channel < p.shape.out_channels;
      weights_[row] = static_cast<int64_t>(has_row_[row] ? channel >> p.log2_block_m : 0) *
                      positions * p.norm_groups;
    }
#pragma unroll
    for (int i = 0; i < kBoxes; ++i) locate(p, tile.boxes[i], i);
  }

  // The number of neighbouring lanes that share a step: enough for all its pixels, and more if
  // there are few steps.
  __device__ int lanes() const { return lanes_; }

  // Fills in a step's mask and, if any of the warp's steps is mixed, its pixels. All lanes that
  // share it get the result. Their loads are all in flight at once.
  __device__ void judge(const ConvParams& p, float tau, StepOf<Config>& step) const {
    const int group = step.group >> max(p.log2_block_k - 6, 0);
    const int index = step.kernel_position * p.norm_groups + group;
    const int row = step.kernel_row * p.shape.dilation.rows;
    const int column = step.kernel_column * p.shape.dilation.columns;
    const float* const from =
        p.norm_input.norms + (row * p.shape.input.columns + column) * p.norm_groups + group;
    float weights[kRows], norms[kBoxes][kOfLane];
#pragma unroll
    for (int row = 0; row < kRows; ++row) weights[row] = weight_norm(p, weights_[row] + index);
#pragma unroll
    for (int i = 0; i < kBoxes; ++i) {
#pragma unroll
      for (int j = 0; j < kOfLane; ++j) {
        const Pixel &first = firsts_[i], &offset = offsets_[j];
        const bool inside =
            static_cast<unsigned>(first.row + offset.row + row) < p.shape.input.rows &&
            static_cast<unsigned>(first.column + offset.column + column) < p.shape.input.columns;
        norms[i][j] = inside ? from[first.norm + offset.norm] : 0;
      }
    }
    uint32_t own[kRows * kBoxes];  // the lane's pixels
#pragma unroll
    for (int i = 0; i < kBoxes; ++i) {
      // Pixels of zeros add nothing, so a step does not become mixed by them.
      const uint32_t zeros = of_lane([&](int j) { return norms[i][j] == 0; });
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        const uint32_t valid = of_lane([&](int j) {
          return is_valid_im2col(weights[row], norm_product(norms[i][j], scale_), tau);
        });
        const int block = row * kBoxes + i;
        own[block] = has_row_[row] ? valid & existing_[i] : 0;
        const bool any = is_in_some_lane(own[block]);
        const bool lacks_some = is_in_some_lane(existing_[i] & ~(own[block] | zeros));
        step.mask |= static_cast<uint16_t>(any) << block;
        step.is_mixed |= any && lacks_some;
      }
    }
    if (!__any_sync(~0u, step.is_mixed)) return;
#pragma unroll
    for (int i = 0; i < kRows * kBoxes; ++i) step.pixels[i] = of_all_lanes(own[i]);
  }

  // The bits of one row's output blocks.
  __device__ uint32_t inside(int row) const {
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < kRows * kBoxes; ++i) {
      const bool is = i / kBoxes == row && has_row_[i / kBoxes] && exists_[i % kBoxes];
      bits |= static_cast<uint32_t>(is) << i;
    }
    return bits;
  }

 private:
  static constexpr int kOfLane = 8;  // pixels of a lane, at most

  // A place in the input, or a distance, and the number of norms before it.
  struct Pixel {
    int row, column, norm;
  };

  __device__ static Pixel pixel_at(const ConvParams& p, int row, int column) {
    return {row, column, (row * p.shape.input.columns + column) * p.norm_groups};
  }

  // Finds the lane's first pixel of box i at kernel position 0, and which of its pixels are in the
  // output.
  __device__ void locate(const ConvParams& p, const Box& box, int i) {
    // Columns are the fastest index of a box, then rows.
    const int log2_columns = p.box.columns, columns = (1 << log2_columns) - 1;
    const int row = box.row + (first_ >> log2_columns), column = box.column + (first_ & columns);
    firsts_[i] = pixel_at(p, row * p.shape.stride.rows - p.shape.padding.rows,
                          column * p.shape.stride.columns - p.shape.padding.columns);
    uint32_t existing = 0;
#pragma unroll
    for (int j = 0; j < kOfLane; ++j) {
      const int down = j >> log2_columns, right = j & columns;
      const bool exists = j < each_ && box.image < p.shape.output.images &&
                          row + down < p.shape.output.rows &&
                          column + right < p.shape.output.columns;
      existing |= static_cast<uint32_t>(exists) << j;
      offsets_[j] = pixel_at(p, down * p.shape.stride.rows, right * p.shape.stride.columns);
    }
    existing_[i] = existing;
    exists_[i] = is_in_some_lane(existing);
  }

  // Bit j: test(j) of a lane's pixels, and anything from bit each_ on.
  template <class Test>
  __device__ __forceinline__ static uint32_t of_lane(const Test& test) {
    uint32_t bits = 0;
#pragma unroll
    for (int j = 0; j < kOfLane; ++j) bits |= static_cast<uint32_t>(test(j)) << j;
    return bits;
  }

  // Tells whether one of the lanes that share a step has a bit.
  __device__ __forceinline__ bool is_in_some_lane(uint32_t of_lane) const {
    return (__ballot_sync(~0u, of_lane != 0) & sharing_) != 0;
  }

  // Joins the bits of the lanes that share a step.
  __device__ __forceinline__ uint64_t of_all_lanes(uint32_t of_lane) const {
    uint64_t bits = static_cast<uint64_t>(of_lane) << first_;
    for (int distance = lanes_ / 2; distance > 0; distance /= 2) {
      bits |= __shfl_xor_sync(~0u, bits, distance);
    }
    return bits;
  }

  float scale_;
  int count_, lanes_, each_, first_;  // pixels of a box, and how lanes share them
  bool has_row_[kRows];
  int64_t weights_[kRows];  // the numbers of their first norms
  Pixel firsts_[kBoxes], offsets_[kOfLane];
  uint32_t existing_[kBoxes];  // a bit for each pixel of the lane that is in the output
  uint32_t sharing_;           // the lanes that share a step
  bool exists_[kBoxes];
};

template <class Config>
requires Config::kByPixel __device__ __forceinline__ uint32_t
list_valid_steps(const ConvParams& p, const Tile<Config>& tile, const TileNorms<Config>& norms,
                 float tau, ListWriter<Config>& writer) {
  const int lanes = norms.lanes(), steps = steps_of_block<Config>(p);
  uint32_t used = 0;
  for (int first = 0; first < steps; first += 32 / lanes) {
    const int number = step_number<Config>(p, first + threadIdx.x % 32 / lanes);
    StepOf<Config> step{step_at(p, min(number, p.steps - 1))};
    norms.judge(p, tau, step);
    if (number >= p.steps || threadIdx.x % lanes != 0) step.mask = 0;
    used |= step.mask;
    writer.append(tile, step);
    if (first + 32 / lanes < steps) writer.hand_over(tile);  // products begin meanwhile
  }
  return used;
}

}  // namespace spamm::kernels::conv::sm90
