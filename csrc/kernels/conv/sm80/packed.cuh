// Tiles of a convolution whose pixel blocks, one pixel of several images each, are filled in part.
// Their rows are those of pixels that exist, so several blocks lie side by side in 32 rows. A
// listed step has a bit for each row, which says whether the step is valid for the row's own block.
// Rows without it are loaded as zeros, like padding. That is exact: a weight block with an infinite
// or NaN entry is never skipped, so zeros meet finite weights alone. All output channels of a tile
// belong to one block.
//
// Slices: a tile of one sub-tile takes long if K does. Four warps share it: step s belongs to warp
// s % 4, whatever is listed, and the sums are added in the order of the warps.
#pragma once

#include "kernels/conv/sm80/norms.cuh"
#include "kernels/conv/sm80/params.h"
#include "kernels/multiply/sm80/multiply.cuh"

namespace spamm::kernels {

// The rows of a tile, and where the norm of a row's block is.
template <class Norm, int kTileM>
struct PackedRows {
  Im2colRow rows[kTileM];
  int norm_pixels[kTileM];  // of the map of norms; of the window's first pixel
  Norm scales[kTileM];      // from the norm of the row's block to its skip norm

  // Row i becomes row `number` of all.
  __device__ void set(int i, int number, const ConvSm80Params<Norm>& p, int group) {
    const Im2colMatrix& m = p.pixels;
    const int pixels = m.output.rows * m.output.columns;
    const int of_block = pixels << m.log2_images, image_block = number / of_block;
    if (number >= pixels * m.images) {
      rows[i].output_pixel = -1;
      return;
    }
    const int images = m.images_of(image_block), rest = number - image_block * of_block;
    const int pixel = rest / images, row = pixel / m.output.columns;
    const int image = (image_block << m.log2_images) + rest - pixel * images;
    rows[i] = Im2colRow::of_pixel(m, image, row, pixel - row * m.output.columns);
    norm_pixels[i] = rows[i].input_pixel + (group * m.image_blocks + image_block - image) *
                                               (m.input.rows * m.input.columns);
    scales[i] =
        partial_block_scale(static_cast<Norm>(1 << m.log2_images), static_cast<Norm>(images));
  }
};

template <int kTileM>
struct PackedStep {
  int step, channel;
  WindowStep window;
  uint32_t rows[kTileM / 32];  // a bit for each

  __device__ bool has_band(int row) const { return rows[row / 32] != 0; }
  __device__ bool has(int row) const { return rows[row / 32] >> row % 32 & 1; }
};

// Tests the rows of a tile for the steps of one block of K.
template <class Norm, int kTileM>
class PackedMask {
 public:
  __device__ PackedMask(const ConvSm80Params<Norm>& p, Norm tau, int group, int column,
                        const PackedRows<Norm, kTileM>& rows)
      : p_(p), tau_(tau), rows_(rows), depth_blocks_(p.pixels.position_depth >> p.log2_block_k) {
    const int blocks_m = ((p.out_channels - 1) >> p.log2_block_m) + 1;
    weight_ = p.norm_weight + static_cast<int64_t>(group * blocks_m + (column >> p.log2_block_m)) *
                                  p.pixels.positions * depth_blocks_;
  }

  __device__ int steps_together() const { return 1 << (p_.log2_block_k - kLog2SubTile); }

  // All lanes of a warp call it with one step.
  __device__ void test(int step, uint32_t (&words)[kTileM / 32]) const {
    const Im2colMatrix& m = p_.pixels;
    int kernel_position, channel;
    m.by_position_depth(kernel_position, channel, step * kSubTile);
    const int depth_block = channel >> p_.log2_block_k;
    const WindowStep window(m, kernel_position);
    const Norm norm_weight = weight_[kernel_position * depth_blocks_ + depth_block];
#pragma unroll
    for (int w = 0; w < kTileM / 32; ++w) {
      const int i = 32 * w + static_cast<int>(threadIdx.x) % 32;
      const Im2colRow row = rows_.rows[i];
      bool valid = row.output_pixel >= 0;
      if (valid) {
        Norm skip_norm = 0;  // the whole block lies in the padding
        if (window.is_inside(m, row.row, row.column)) {
          const int64_t pixel = rows_.norm_pixels[i] + window.pixels;
          skip_norm = norm_product(p_.norm_pixels.norms[pixel * depth_blocks_ + depth_block],
                                   rows_.scales[i]);
        }
        valid = is_valid_im2col(norm_weight, skip_norm, tau_);
      }
      words[w] = __ballot_sync(~0u, valid);
    }
  }

  __device__ void locate(int step, PackedStep<kTileM>& listed) const {
    int kernel_position;
    p_.pixels.by_position_depth(kernel_position, listed.channel, step * kSubTile);
    listed.step = step;
    listed.window = WindowStep(p_.pixels, kernel_position);
  }

 private:
  const ConvSm80Params<Norm>& p_;
  Norm tau_;
  const PackedRows<Norm, kTileM>& rows_;
  int depth_blocks_;
  const Norm* weight_;
};

// The list of the valid steps of a tile, as ValidList: one for each slice.
template <int kTileM, int kTileN, int kThreads, int kSlices>
class PackedList {
  static constexpr int kWords = kTileM / 32, kWarps = kThreads / 32;
  static constexpr int kCapacity = 2 * kThreads;
  static_assert(32 % kSlices == 0);

 public:
  struct Storage {
    PackedStep<kTileM> steps[kCapacity];  // those of the slices alternate
    uint32_t tested[kThreads][kWords];
    int warp_counts[kWarps][kSlices];
  };

  // `channels`: those of the output that are left from the tile's first one on.
  __device__ PackedList(int64_t depth, int channels, Storage& storage)
      : storage_(storage),
        steps_(static_cast<int>(depth / kSubTile)),
        bands_((1u << min((channels + 31) / 32, kTileN / 32)) - 1) {}

  // Lists the next steps, and returns the largest number of a slice; 0 at the end of K. A warp
  // tests all rows together, for the steps of one block of K.
  template <class Mask>
  __device__ int fill(const Mask& mask) {
#pragma unroll
    for (int s = 0; s < kSlices; ++s) counts_[s] = 0;
    int most = 0;
    for (; next_ < steps_ && kSlices * most + kThreads <= kCapacity; next_ += kThreads) {
      const int together = mask.steps_together(), end = min(kThreads, steps_ - next_);
#pragma unroll 2
      for (int first = threadIdx.x / 32 * together; first < end; first += kWarps * together) {
        uint32_t rows[kWords];
        mask.test(next_ + first, rows);
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int w = 0; w < kWords; ++w) {
          if (lane < together) storage_.tested[first + lane][w] = rows[w];
        }
      }
      __syncthreads();
      append(mask, end);
#pragma unroll
      for (int s = 0; s < kSlices; ++s) most = max(most, counts_[s]);
    }
    if constexpr (kSlices > 1) {  // shorter lists end with steps that are valid for no row
#pragma unroll
      for (int s = 0; s < kSlices; ++s) {
        for (int i = counts_[s] + static_cast<int>(threadIdx.x); i < most; i += kThreads) {
          for (uint32_t& rows : storage_.steps[i * kSlices + s].rows) rows = 0;
        }
      }
      __syncthreads();
    }
    return most;
  }

  __device__ const PackedStep<kTileM>& operator[](int index) const { return storage_.steps[index]; }

  // The bits of sub-tiles, as in ValidList.
  __device__ uint32_t mask_of(const PackedStep<kTileM>& step) const {
    uint32_t mask = 0;
#pragma unroll
    for (int r = 0; r < kWords; ++r) mask |= step.rows[r] != 0 ? bands_ << r * (kTileN / 32) : 0;
    return mask;
  }
  __device__ uint32_t bands() const { return bands_; }

 private:
  template <class Mask>
  __device__ void append(const Mask& mask, int end) {
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    uint32_t any = 0;
#pragma unroll
    for (int w = 0; w < kWords; ++w) any |= thread < end ? storage_.tested[thread][w] : 0;
    const uint32_t bitmap = __ballot_sync(~0u, any != 0);
#pragma unroll
    for (int s = 0; s < kSlices; ++s) {
      if (lane == s) storage_.warp_counts[warp][s] = __popc(bitmap & lanes_of(s));
    }
    __syncthreads();
#pragma unroll
    for (int s = 0; s < kSlices; ++s) {
      int slot = counts_[s];
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        if (w < warp) slot += storage_.warp_counts[w][s];
        counts_[s] += storage_.warp_counts[w][s];
      }
      if (any != 0 && lane % kSlices == s) {
        slot += __popc(bitmap & lanes_of(s) & ((1u << lane) - 1));
        PackedStep<kTileM>& step = storage_.steps[slot * kSlices + s];
        mask.locate(next_ + thread, step);
#pragma unroll
        for (int w = 0; w < kWords; ++w) step.rows[w] = storage_.tested[thread][w];
      }
    }
    __syncthreads();
  }

  // The lanes whose steps belong to a slice.
  __device__ static constexpr uint32_t lanes_of(int slice) {
    uint32_t lanes = 0;
    for (int lane = slice; lane < 32; lane += kSlices) lanes |= 1u << lane;
    return lanes;
  }

  Storage& storage_;
  int steps_;
  uint32_t bands_;
  int counts_[kSlices] = {};
  int next_ = 0;  // the first step not yet tested
};

// Adds the products of `count` listed steps of each slice, as multiply_list; but a whole step, of
// several stages, is loaded and multiplied at a time.
template <class Config, class StreamA, class StreamB>
__device__ void multiply_packed(const typename Config::List& list, int count,
                                typename Config::Storage& storage, const StreamA& a,
                                const StreamB& b, int slice, WarpProduct<Config>& product) {
  constexpr int kSlices = Config::kSlices, kParts = Config::kParts;
  using Stage = typename Config::Storage::Stage;
  const auto stages_of = [&](int s, int slice) -> Stage* {
    return storage.stages + (s % Config::kRing * kSlices + slice) * kParts;
  };
  const auto copy = [&](int s, int) {
#pragma unroll
    for (int of = 0; of < kSlices; ++of) {
      const auto& step = list[s * kSlices + of];
      if (kSlices > 1 && list.mask_of(step) == 0) continue;
      Stage* const stages = stages_of(s, of);
      a.template copy_step<kParts>(stages->a, sizeof(Stage), step);
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        const int64_t k = int64_t{step.step} * kSubTile + part * Config::TileB::kDepth;
        b.copy(stages[part].b, k, list.bands());
      }
    }
  };
  run_pipeline<Config::kRing - 1>(count, std::identity(), copy, [&](int s, int) {
    const auto& step = list[s * kSlices + slice];
    const uint32_t mask = list.mask_of(step);
    if (kSlices > 1 && mask == 0) return;
    product.begin_step(step.step / kSlices);
#pragma unroll
    for (int part = 0; part < kParts; ++part) product.multiply(stages_of(s, slice)[part], mask);
  });
}

// The sums of a slice in shared memory, with the interface of Epilogue.
template <class Sum>
struct SliceSums {
  using Rows = Sum[kSubTile][kSubTile + 1];  // neighbouring rows begin in different banks
  Rows& rows;

  __device__ bool is_plain() const { return true; }

  template <bool kPlain, int kWidth>
  __device__ void store(int i, int j, const Sum (&sums)[kWidth]) const {
#pragma unroll
    for (int w = 0; w < kWidth; ++w) rows[i][j + w] = sums[w];
  }
};

// Adds the sums of the slices, and stores the tile. All stages have been read.
template <class Config, class Target>
__device__ void store_slices(typename Config::Storage& storage, int slice,
                             const WarpProduct<Config>& product, const Target& epilogue) {
  using Sum = typename Config::Sum;
  using Rows = typename SliceSums<Sum>::Rows;
  static_assert(Config::kSlices * sizeof(Rows) <= sizeof(storage.stages));
  auto* const slices = reinterpret_cast<Rows*>(storage.stages);
  product.store(SliceSums<Sum>{slices[slice]});
  __syncthreads();
  for (int e = threadIdx.x; e < 32 * 32; e += Config::kThreads) {
    Sum sum[1] = {slices[0][e / 32][e % 32]};
#pragma unroll
    for (int s = 1; s < Config::kSlices; ++s) sum[0] += slices[s][e / 32][e % 32];
    epilogue.template store</*kPlain=*/false>(e / 32, e % 32, sum);
  }
}

}  // namespace spamm::kernels
