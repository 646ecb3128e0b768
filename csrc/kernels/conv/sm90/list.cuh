// The list warp of the Hopper convolution. It claims tiles and lists the valid steps of each, one
// tile ahead of the loads.
#pragma once

#include "kernels/common/overlap.cuh"
#include "kernels/common/skip_test.cuh"
#include "kernels/conv/sm90/segments.cuh"

namespace spamm::kernels::conv::sm90 {

// Box number `index` of the output. A number past the last box gives a box outside the output.
__device__ inline Box box_at(const ConvParams& p, int index) {
  int image, row, column;
  if (p.images_fastest) {
    p.by_box_images(index, image, index);
    p.by_box_columns(row, column, index);
    if (row >= p.boxes.rows) image = p.boxes.images;
    // So that half of all tiles further on lies the opposite place: the edge of the middle.
    if (2 * row >= p.boxes.rows) {
      column += p.boxes.columns / 2;
      if (column >= p.boxes.columns) column -= p.boxes.columns;
    }
  } else {
    p.by_box_columns(index, column, index);
    p.by_box_rows(image, row, index);
  }
  return {image << p.box.images, row << p.box.rows, column << p.box.columns};
}

// The factor from the norm of a pixel block to its skip norm.
__device__ inline float skip_norm_scale(const ConvParams& p, const Box& first) {
  const int images = min(1 << p.block.images, p.shape.output.images - first.image);
  const int rows = min(1 << p.block.rows, p.shape.output.rows - first.row);
  const int columns = min(1 << p.block.columns, p.shape.output.columns - first.column);
  const int n = 1 << p.block.volume(), c = images * rows * columns;
  return c == n ? 1 : partial_block_scale(static_cast<float>(n), static_cast<float>(c));
}

// The norms of one box's im2col blocks. There are fewer than 2^31, so their numbers fit an int.
class BoxNorms {
 public:
  BoxNorms() = default;
  __device__ BoxNorms(const ConvParams& p, const Box& box) {
    const Box block = {box.image >> p.block.images, box.row >> p.block.rows,
                       box.column >> p.block.columns};
    scale_ = skip_norm_scale(p, {block.image << p.block.images, block.row << p.block.rows,
                                 block.column << p.block.columns});
    row_ = box.row * p.shape.stride.rows - p.shape.padding.rows;
    column_ = box.column * p.shape.stride.columns - p.shape.padding.columns;
    if (p.norm_input.norms == nullptr) return;
    if (p.norm_input.per_pixel) {
      const int pixels = p.shape.input.rows * p.shape.input.columns;
      norms_ = p.norm_input.norms + block.image * pixels * p.norm_groups;
    } else {
      const int number =
          (block.image * p.blocks.rows + block.row) * p.blocks.columns + block.column;
      norms_ = p.norm_input.norms +
               number * p.shape.kernel.rows * p.shape.kernel.columns * p.norm_groups;
    }
  }

  // The norm, not yet scaled to the skip norm. 0 if the whole block lies in the padding. If no
  // norms were taken, 1 for any other block: with a tau of at most 0 it is valid.
  __device__ float at(const ConvParams& p, const Step& step, int group) const {
    const int row = row_ + step.kernel_row * p.shape.dilation.rows;
    const int column = column_ + step.kernel_column * p.shape.dilation.columns;
    if (p.norm_input.norms == nullptr) {
      return meets(row, p.box.rows, p.shape.stride.rows, p.shape.input.rows) &&
             meets(column, p.box.columns, p.shape.stride.columns, p.shape.input.columns);
    }
    if (!p.norm_input.per_pixel) return norms_[step.kernel_position * p.norm_groups + group];
    const bool inside = static_cast<unsigned>(row) < p.shape.input.rows &&
                        static_cast<unsigned>(column) < p.shape.input.columns;
    return inside ? norms_[(row * p.shape.input.columns + column) * p.norm_groups + group] : 0;
  }

  __device__ float scale() const { return scale_; }

 private:
  // Tells whether 2^log2_count places from `first` on, `stride` apart, reach into 0 to size - 1.
  __device__ static bool meets(int first, int log2_count, int stride, int size) {
    return first < size && first + ((1 << log2_count) - 1) * stride >= 0;
  }

  const float* norms_;
  int row_, column_;
  float scale_;
};

// Computes the masks of a tile's steps from the norms.
template <class Config>
class TileNorms {
 public:
  __device__ TileNorms(const ConvParams& p, const Tile<Config>& tile) {
    uint32_t exists = 0;
#pragma unroll
    for (int i = 0; i < Config::kBoxes; ++i) {
      const bool box_exists = tile.boxes[i].image < p.shape.output.images;
      exists |= static_cast<uint32_t>(box_exists) << i;
      boxes_[i] = BoxNorms(p, box_exists ? tile.boxes[i] : Box{});
    }
    const int positions = p.shape.kernel.rows * p.shape.kernel.columns;
#pragma unroll
    for (int row = 0; row < Config::kRows; ++row) {
      const int channel = tile.channel + row * kBlock;
      const bool row_exists = channel < p.shape.out_channels;
      if (row_exists) inside_ |= exists << (row * Config::kBoxes);
      weights_[row] = static_cast<int64_t>(row_exists ? channel >> p.log2_block_m : 0) * positions *
                      p.norm_groups;
    }
  }

  // Separate from mask(), so that the norms of several steps can be in flight.
  struct Norms {
    float weights[Config::kRows], boxes[Config::kBoxes];
  };
  __device__ Norms load(const ConvParams& p, const Step& step) const {
    Norms norms;
    const int group = step.group >> max(p.log2_block_k - 6, 0);
#pragma unroll
    for (int row = 0; row < Config::kRows; ++row) {
      // If no norms are given, they are as if infinite, because an infinite weight must meet the
      // zeros of the padding, too.
      const int64_t index = weights_[row] + step.kernel_position * p.norm_groups + group;
      norms.weights[row] = p.norm_weight == nullptr ? INFINITY : p.norm_weight[index];
    }
#pragma unroll
    for (int i = 0; i < Config::kBoxes; ++i) norms.boxes[i] = boxes_[i].at(p, step, group);
    return norms;
  }

  __device__ uint32_t mask(const Norms& norms, float tau) const {
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < Config::kBoxes; ++i) {
      const float skip_norm = norm_product(norms.boxes[i], boxes_[i].scale());
#pragma unroll
      for (int row = 0; row < Config::kRows; ++row) {
        const bool needed = is_valid_im2col(norms.weights[row], skip_norm, tau);
        bits |= static_cast<uint32_t>(needed) << (row * Config::kBoxes + i);
      }
    }
    return bits & inside_;
  }

  // The bits of one row's output blocks.
  __device__ uint32_t inside(int row) const {
    return inside_ & ((1u << Config::kBoxes) - 1) << (row * Config::kBoxes);
  }

 private:
  int64_t weights_[Config::kRows];  // the numbers of their first norms
  BoxNorms boxes_[Config::kBoxes];
  uint32_t inside_ = 0;
};

template <class Config>
using ListWriter = kernels::sm90::ListWriter<RingOf<Config>, Config::kLists>;

// The first warp initialises the barriers in shared memory. The list warp waits for this later than
// all others: it first locates its tile and waits for the previous kernel.
constexpr int kOthersBarrier = 5, kListBarrier = 6;  // named barriers; warpgroups use 1 to 4
constexpr int kFirstPairBarrier = 7, kSecondPairBarrier = 0;  // of two warpgroups

template <class Config, class Shared>
__device__ __forceinline__ void set_up_barriers(Shared& storage, int warp) {
  if (warp == kernels::sm90::kFirstListWarp) return;
  if (warp == 0) {
    if (threadIdx.x == 0) storage.initialize();
    __syncwarp();
    cutlass::arch::NamedBarrier::arrive(64, kListBarrier);
  }
  cutlass::arch::NamedBarrier::sync(Config::kThreads - 32, kOthersBarrier);
}

// The tile after number `tile`: the claimed one, or without a counter the next at a stride of the
// grid. Each thread block claims until it gets a number past the end. So the number of claims is
// p.tiles, and the block that makes the last claim resets the counter for the next launch.
__device__ inline int claim_tile(const ConvParams& p, int tile) {
  if (p.next_tile == nullptr) return tile + gridDim.x;
  const int claimed = threadIdx.x % 32 == 0 ? atomicAdd(p.next_tile, 1) : 0;
  if (threadIdx.x % 32 == 0 && claimed == p.tiles - 1) *p.next_tile = 0;
  return gridDim.x + __shfl_sync(~0u, claimed, 0);
}

__device__ inline Step step_at(const ConvParams& p, int number) {
  int kernel_position, group, row, column;
  p.by_box_groups(kernel_position, group, number);
  p.by_kernel_columns(row, column, kernel_position);
  return {0, static_cast<uint16_t>(group), static_cast<uint8_t>(row), static_cast<uint8_t>(column),
          static_cast<uint16_t>(kernel_position)};
}

// Lists the valid ones of the thread block's steps first, first + 32, ..., kCount for each lane.
// Their norms are loaded together.
template <int kCount, class Config>
__device__ __forceinline__ void list_some(const ConvParams& p, const Tile<Config>& tile,
                                          const TileNorms<Config>& norms, float tau, int first,
                                          ListWriter<Config>& writer) {
  Step of_lane[kCount];
  typename TileNorms<Config>::Norms loaded[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    of_lane[i] = step_at(p, min(step_number<Config>(p, first + 32 * i), p.steps - 1));
    loaded[i] = norms.load(p, of_lane[i]);
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const bool exists = step_number<Config>(p, first + 32 * i) < p.steps;
    if (exists) of_lane[i].mask = norms.mask(loaded[i], tau);
    writer.append(tile, of_lane[i]);
  }
}

// Lists the valid ones of the thread block's steps of a tile.
template <class Config>
__device__ __forceinline__ void list_valid_steps(const ConvParams& p, const Tile<Config>& tile,
                                                 const TileNorms<Config>& norms, float tau,
                                                 ListWriter<Config>& writer) {
  const int lane = threadIdx.x % 32, steps = steps_of_block<Config>(p);
  int done = 0;
#pragma unroll 1
  for (; done + 32 < steps; done += 64) list_some<2>(p, tile, norms, tau, done + lane, writer);
  if (done < steps) list_some<1>(p, tile, norms, tau, done + lane, writer);
}

// Lists the steps that bring the residual, one for each row of a tile.
template <class Config>
__device__ __forceinline__ void list_residual(const Tile<Config>& tile,
                                              const TileNorms<Config>& norms,
                                              ListWriter<Config>& writer) {
  const int row = threadIdx.x % 32;
  StepOf<Config> step{};
  step.group = row;
  step.kernel_position = Step::kResidual;
  if (row < Config::kRows) step.mask = norms.inside(row);
  writer.append(tile, step);
}

// The places of tiles. Kernels whose tiles lie in another way have their own.
template <class Config>
struct BoxTiles {
  __device__ __forceinline__ static Tile<Config> at(const ConvParams& p, int number) {
    int pixels, channels;
    p.by_channel_tiles(pixels, channels, number);
    Tile<Config> tile;
    tile.channel = channels * Config::kRows * kBlock;
#pragma unroll
    for (int i = 0; i < Config::kBoxes; ++i) tile.boxes[i] = box_at(p, pixels * Config::kBoxes + i);
    return tile;
  }
};

template <class Config, class Tiles>
__device__ void list_steps(const ConvParams& p, RingOf<Config>& ring) {
  float tau = 0;
  ListWriter<Config> writer(ring);

  bool waited = false;
  for (int number = blockIdx.x >> log2_segments<Config>(p); number < p.tiles;
       number = claim_tile(p, number)) {
    const Tile<Config> tile = Tiles::at(p, number);
    const TileNorms<Config> norms(p, tile);
    // Nothing is loaded or stored before it is listed, so no other warp needs to wait here.
    if (!waited) {
      wait_for_previous_kernel();
      cutlass::arch::NamedBarrier::sync(64, kListBarrier);
      tau = p.tau.value();
      waited = true;
    }
    list_valid_steps(p, tile, norms, tau, writer);
    if (brings_residual<Config>(p)) list_residual<Config>(tile, norms, writer);
    writer.end_tile(tile);
    writer.wait_for_room();
  }
  writer.end_work();
}

// ---- By pixel ----------------------------------------------------------------------------------

// Small batches, whose pixel blocks are one pixel of more images than there are.

// Reads what valid_pixels() found for a tile's steps. A tile has one row, because its pixels are
// cleared for one block of output channels.
template <class Config>
requires Config::kByPixel class TileNorms<Config> {
  static_assert(Config::kRows == 1);

 public:
  __device__ TileNorms(const ConvParams& p, const Tile<Config>& tile) {
    const int blocks_m = ((p.shape.out_channels - 1) >> p.log2_block_m) + 1;
#pragma unroll
    for (int i = 0; i < Config::kBoxes; ++i) {
      const Box& box = tile.boxes[i];
      const bool exists = box.image < p.shape.output.images;
      const int number =
          exists ? (box.row >> p.box.rows) * p.boxes.columns + (box.column >> p.box.columns) : 0;
      exists_ |= static_cast<uint32_t>(exists) << i;
      words_[i] = p.valid_pixels +
                  (static_cast<int64_t>(number) * blocks_m + (tile.channel >> p.log2_block_m)) *
                      norms_of_block(p);
    }
  }

  // Fills in a step's mask and pixels.
  __device__ void judge(const ConvParams& p, StepOf<Config>& step) const {
    const int index =
        step.kernel_position * p.norm_groups + (step.group >> max(p.log2_block_k - 6, 0));
#pragma unroll
    for (int i = 0; i < Config::kBoxes; ++i) step.pixels[i] = words_[i][index];
#pragma unroll
    for (int i = 0; i < Config::kBoxes; ++i) {
      const bool valid = (exists_ >> i & 1) && step.pixels[i] != 0;
      step.mask |= static_cast<uint16_t>(valid << i);
      step.is_mixed |= valid && step.pixels[i] != ~uint64_t{0};
    }
  }

  // The bits of one row's output blocks.
  __device__ uint32_t inside(int) const { return exists_; }

 private:
  const uint64_t* words_[Config::kBoxes];  // of the tile's block of output channels
  uint32_t exists_ = 0;
};

template <class Config>
requires Config::kByPixel __device__ __forceinline__ void list_valid_steps(
    const ConvParams& p, const Tile<Config>& tile, const TileNorms<Config>& norms, float,
    ListWriter<Config>& writer) {
  const int steps = steps_of_block<Config>(p);
  for (int first = 0; first < steps; first += 32) {
    const int number = step_number<Config>(p, first + threadIdx.x % 32);
    StepOf<Config> step{step_at(p, min(number, p.steps - 1))};
    if (number < p.steps) norms.judge(p, step);
    __syncwarp();
    writer.append(tile, step);
    if (first + 32 < steps) writer.hand_over(tile);  // products begin meanwhile
  }
}

}  // namespace spamm::kernels::conv::sm90
