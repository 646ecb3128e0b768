// A convolution for sm_80 and newer, all types and blocks. It is the product of
// multiply/sm80/multiply.cuh: im2col matrix (pixels x K) times weight (K x output channels). The
// im2col matrix is gathered from the channels-last input.
//
// cp.async copies 16 bytes of channels at a time, from the pixel that a row's window has at the
// stage's kernel position, or zeros for padding. A table in shared memory holds the place of the
// window of each row of the tile. The epilogue adds the bias and applies ReLU.
#pragma once

#include <algorithm>

#include "kernels/conv/sm80/norms.cuh"
#include "kernels/conv/sm80/packed.cuh"
#include "kernels/conv/sm80/params.h"
#include "kernels/multiply/sm80/multiply.cuh"

namespace spamm::kernels {

template <class Engine, class Shape>
struct ConvConfig : MultiplyConfig<Engine, Shape, true, true> {
  using Base = MultiplyConfig<Engine, Shape, true, true>;
  using Params = ConvSm80Params<typename Engine::Sum>;
  static constexpr int kRows = Shape::kTileM / 32, kColumns = Shape::kTileN / 32;

  struct Storage : Base::Storage {
    Im2colRow rows[Shape::kTileM];
  };
};

// The same for packed rows.
template <class Engine, class Shape, int kSlices_ = 1>
struct PackedConfig : MultiplyConfig<Engine, Shape, true, true> {
  using Base = MultiplyConfig<Engine, Shape, true, true>;
  using Params = ConvSm80Params<typename Engine::Sum>;
  static constexpr int kSlices = kSlices_, kThreads = kSlices * Shape::kThreads;
  static constexpr int kBlocksPerSm = std::max(kPackedBlocks, Shape::kBlocksPerSm);
  static constexpr int kParts = kSubTile / Base::TileA::kDepth;       // stages of a step
  static constexpr int kRing = std::max(2, Shape::kStages / kParts);  // steps in shared memory
  using List = PackedList<Shape::kTileM, Shape::kTileN, kThreads, kSlices>;

  struct Storage {
    using Stage = typename Base::Storage::Stage;
    Stage stages[kRing * kSlices * kParts];
    typename List::Storage list;
    PackedRows<typename Engine::Sum, Shape::kTileM> tile;
  };
};

// Like OperandStream, but gathers the lines of a tile of the im2col matrix.
template <class Tile, int kThreads>
class Im2colStream {
  using Element = typename Tile::Element;
  static constexpr int kPassLines = kThreads / Tile::kLineChunks;
  static constexpr int kPasses = Tile::kLines / kPassLines;
  static_assert(Tile::kKMajor && kPasses * kPassLines == Tile::kLines);

 public:
  __device__ Im2colStream(const Im2colMatrix& matrix, int group, const Im2colRow* rows)
      : matrix_(matrix), rows_(rows), first_channel_(group * matrix.channels) {}

  // As OperandStream's.
  __device__ void copy(char* stage, int64_t k, uint32_t bands) const {
    int kernel_position, channel;
    matrix_.by_position_depth(kernel_position, channel, static_cast<int>(k));
    copy_step<1>(stage, 0, BandStep{channel, WindowStep(matrix_, kernel_position), bands});
  }

  // Copies the lines of a step into kParts stages that begin `distance` bytes apart. Lines that it
  // does not have become zeros, or keep their old contents where it has none of their band.
  template <int kParts, class Step>
  __device__ void copy_step(char* stage, int distance, const Step& step) const {
    const int first_line = threadIdx.x / Tile::kLineChunks;
    const int chunk = threadIdx.x % Tile::kLineChunks;
    const int channel = step.channel + chunk * Tile::kChunkElements;
    const auto* data = static_cast<const Element*>(matrix_.data);
    const auto* source = data + first_channel_ + channel;
    const int pixel_stride = matrix_.groups * matrix_.channels;
    const typename Tile::Place place(first_line, chunk);
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const int line = first_line + pass * kPassLines;
      if (!step.has_band(line)) continue;
      const Im2colRow row = rows_[line];
      const bool exists = step.has(line) && step.window.is_inside(matrix_, row.row, row.column);
      const int64_t number = row.input_pixel + step.window.pixels;
      const auto* from = source + number * pixel_stride;
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        const bool has = channel + part * Tile::kDepth < matrix_.channels && exists;
        copy_async(stage + part * distance + place.offset(pass * kPassLines, 0),
                   has ? from + part * Tile::kDepth : data, has ? kChunkBytes : 0);
      }
    }
  }

 private:
  struct BandStep {
    int channel;
    WindowStep window;
    uint32_t bands;

    __device__ bool has_band(int line) const { return bands >> line / 32 & 1; }
    __device__ bool has(int) const { return true; }
  };

  const Im2colMatrix& matrix_;
  const Im2colRow* rows_;
  int first_channel_;
};

// The skip norms of 32 rows of a tile. They belong to one pixel block.
template <class Norm>
class BandNorms {
 public:
  __device__ BandNorms(const ConvSm80Params<Norm>& p, int group, int first_row) {
    const Im2colMatrix& m = p.pixels;
    const int number = first_row >> m.log2_block();
    const BlockOrigin block(m, number);
    // If the image of the first row does not exist, none of the 32 rows does.
    const int index = first_row & ((1 << m.log2_block()) - 1);
    exists_ = block.image + (index >> (m.log2_rows + m.log2_columns)) < m.images;
    if (!exists_) return;
    const int depth_blocks = m.position_depth >> p.log2_block_k;
    if (p.norm_pixels.per_pixel) {
      const Im2colRow first = Im2colRow::at(m, block, 0);
      row_ = first.row, column_ = first.column;
      const int64_t image =
          static_cast<int64_t>(group) * m.image_blocks + (block.image >> m.log2_images);
      norms_ = p.norm_pixels.norms +
               ((image * m.input.rows + row_) * m.input.columns + column_) * depth_blocks;
    } else {
      norms_ = p.norm_pixels.norms + (static_cast<int64_t>(group) * m.block_count() + number) *
                                         m.positions * depth_blocks;
    }
    const int c = min(1 << m.log2_images, m.images - block.image) *
                  min(1 << m.log2_rows, m.output.rows - block.row) *
                  min(1 << m.log2_columns, m.output.columns - block.column);
    scale_ = partial_block_scale(static_cast<Norm>(1 << m.log2_block()), static_cast<Norm>(c));
  }

  __device__ bool exists() const { return exists_; }

  // The skip norm. 0 if the whole block lies in the padding.
  __device__ Norm at(const ConvSm80Params<Norm>& p, int kernel_position, int depth_block) const {
    const Im2colMatrix& m = p.pixels;
    const int depth_blocks = m.position_depth >> p.log2_block_k;
    int64_t number = kernel_position;
    if (p.norm_pixels.per_pixel) {
      const WindowStep step(m, kernel_position);
      if (!step.is_inside(m, row_, column_)) return 0;
      number = step.pixels;
    }
    return norm_product(norms_[number * depth_blocks + depth_block], scale_);
  }

 private:
  const Norm* norms_;
  int row_, column_;
  Norm scale_;
  bool exists_;
};

// Computes the mask of a step: the sub-tiles of the tile for which it is valid.
template <class Config>
class TileMask {
  using Norm = typename Config::Sum;

 public:
  __device__ TileMask(const ConvSm80Params<Norm>& p, Norm tau, int group, int row, int column)
      : p_(p), tau_(tau), group_(group), row_(row), column_(column) {}

  __device__ uint32_t operator()(int step) const {
    const Im2colMatrix& m = p_.pixels;
    int kernel_position, channel;
    m.by_position_depth(kernel_position, channel, step * 32);
    const int depth_block = channel >> p_.log2_block_k;
    const int depth_blocks = m.position_depth >> p_.log2_block_k;
    const int64_t blocks_k = static_cast<int64_t>(m.positions) * depth_blocks;
    const int64_t blocks_m = ((p_.out_channels - 1) >> p_.log2_block_m) + 1;
    const Norm* weight = p_.norm_weight + group_ * blocks_m * blocks_k +
                         kernel_position * depth_blocks + depth_block;
    Norm norm_weight[Config::kColumns];
#pragma unroll
    for (int c = 0; c < Config::kColumns; ++c) {
      const int at = column_ + 32 * c;
      norm_weight[c] = at < p_.out_channels ? weight[(at >> p_.log2_block_m) * blocks_k] : 0;
    }
    uint32_t mask = 0;
#pragma unroll 1  // registers are scarce: they also hold the sums of the tile
    for (int r = 0; r < Config::kRows; ++r) {
      const BandNorms<Norm> band(p_, group_, row_ + 32 * r);
      if (!band.exists()) continue;
      const Norm skip_norm = band.at(p_, kernel_position, depth_block);
#pragma unroll
      for (int c = 0; c < Config::kColumns; ++c) {
        const bool inside = column_ + 32 * c < p_.out_channels;
        const bool needed = is_valid_im2col(norm_weight[c], skip_norm, tau_);
        mask |= static_cast<uint32_t>(inside && needed) << (r * Config::kColumns + c);
      }
    }
    return mask;
  }

 private:
  const ConvSm80Params<Norm>& p_;
  Norm tau_;
  int group_, row_, column_;
};

// Stores one tile of the output. `channel` is its first channel in the group.
template <class Config>
class PixelEpilogue {
  using Element = typename Config::Element;
  using Sum = typename Config::Sum;

 public:
  __device__ PixelEpilogue(const ConvSm80Params<Sum>& p, int group, int channel,
                           const Im2colRow* rows)
      : p_(p),
        rows_(rows),
        channels_left_(p.out_channels - channel),
        first_(group * p.out_channels + channel) {}

  // True if all channels of the tile exist and lines start at multiples of 16 bytes.
  __device__ bool is_plain() const {
    return channels_left_ >= Config::kTileN && p_.out_channels * sizeof(Element) % 16 == 0;
  }

  // Stores the sums of kWidth neighbouring channels that start at (i, j) of the tile.
  template <bool kPlain, int kWidth>
  __device__ void store(int i, int j, const Sum (&sums)[kWidth]) const {
    const int pixel = rows_[i].output_pixel;
    if (pixel < 0) return;
    const int channel = first_ + j;
    Element* const to = static_cast<Element*>(p_.output) +
                        static_cast<int64_t>(pixel) * p_.pixels.groups * p_.out_channels + channel;
    Neighbours<Element, kWidth> result;
#pragma unroll
    for (int w = 0; w < kWidth; ++w) {
      if (kPlain || j + w < channels_left_) {
        result.entries[w] = narrow<Element>(finish(channel + w, sums[w]));
      }
    }
    if constexpr (kPlain) {
      *reinterpret_cast<Neighbours<Element, kWidth>*>(to) = result;
    } else {
#pragma unroll
      for (int w = 0; w < kWidth; ++w) {
        if (j + w < channels_left_) to[w] = result.entries[w];
      }
    }
  }

 private:
  __device__ Sum finish(int channel, Sum sum) const {
    if (p_.bias != nullptr) sum += widen(static_cast<const Element*>(p_.bias)[channel]);
    return p_.relu && sum < 0 ? 0 : sum;  // keeps NaN, like torch's relu
  }

  const ConvSm80Params<Sum>& p_;
  const Im2colRow* rows_;
  int channels_left_, first_;
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerSm)
    conv_sm80(const __grid_constant__ typename Config::Params p) {
  extern __shared__ __align__(128) char shared[];
  auto& storage = *reinterpret_cast<typename Config::Storage*>(shared);
  const Im2colMatrix& m = p.pixels;
  const int log2_block = m.log2_block();
  const int64_t rows = static_cast<int64_t>(m.block_count()) << log2_block;
  const TileOrder<16> order{static_cast<int>((rows - 1) / Config::kTileM + 1),
                            (p.out_channels - 1) / Config::kTileN + 1};
  const int tiles = order.per_batch() * m.groups;

  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const auto [group, tile_row, tile_column] = order[tile];
    const int row = tile_row * Config::kTileM, column = tile_column * Config::kTileN;
    __syncthreads();  // all threads have finished the previous tile, so its rows may be overwritten
    for (int i = threadIdx.x; i < Config::kTileM; i += Config::kThreads) {
      const BlockOrigin block(m, (row + i) >> log2_block);
      storage.rows[i] = Im2colRow::at(m, block, (row + i) & ((1 << log2_block) - 1));
    }
    const Im2colStream<typename Config::TileA, Config::kThreads> a(m, group, storage.rows);
    const OperandStream<typename Config::TileB, Config::kThreads> b(p.weight, group, column,
                                                                    p.out_channels, m.depth());
    WarpProduct<Config> product;
    typename Config::List list(m.depth(), storage.list);
    const TileMask<Config> mask_of(p, p.tau.value(), group, row, column);
    // fill() has a barrier, after which all threads see the rows.
    while (const int count = list.fill(mask_of)) {
      multiply_list<Config>(list, count, storage, a, b, product);
    }
    product.store(PixelEpilogue<Config>(p, group, column, storage.rows));
  }
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerSm)
    conv_packed(const __grid_constant__ typename Config::Params p) {
  extern __shared__ __align__(128) char shared[];
  auto& storage = *reinterpret_cast<typename Config::Storage*>(shared);
  const Im2colMatrix& m = p.pixels;
  const TileOrder<16> order{(packed_rows(m) - 1) / Config::kTileM + 1,
                            (p.out_channels - 1) / Config::kTileN + 1};
  const int tiles = order.per_batch() * m.groups;
  // The shuffle tells the compiler that the value is uniform in the warp.
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);

  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const auto [group, tile_row, tile_column] = order[tile];
    const int row = tile_row * Config::kTileM, column = tile_column * Config::kTileN;
    __syncthreads();  // all threads have finished the previous tile, so its rows may be overwritten
    for (int i = threadIdx.x; i < Config::kTileM; i += Config::kThreads) {
      storage.tile.set(i, row + i, p, group);
    }
    __syncthreads();
    const Im2colStream<typename Config::TileA, Config::kThreads> a(m, group, storage.tile.rows);
    const OperandStream<typename Config::TileB, Config::kThreads> b(p.weight, group, column,
                                                                    p.out_channels, m.depth());
    const PackedMask mask(p, p.tau.value(), group, column, storage.tile);
    typename Config::List list(m.depth(), p.out_channels - column, storage.list);
    const int slice = Config::kSlices > 1 ? warp : 0;
    WarpProduct<Config> product(Config::kSlices > 1 ? 0 : warp);
    while (const int count = list.fill(mask)) {
      multiply_packed<Config>(list, count, storage, a, b, slice, product);
    }
    const PixelEpilogue<Config> epilogue(p, group, column, storage.tile.rows);
    if constexpr (Config::kSlices > 1) {
      store_slices<Config>(storage, slice, product, epilogue);
    } else {
      product.store(epilogue);
    }
  }
}

}  // namespace spamm::kernels

namespace spamm::kernels::sm80 {

template <class Engine, Tiles kTiles>
cudaError_t convolve(const ConvSm80Params<typename Engine::Sum>& p, const Launch& how) {
  const Im2colMatrix& m = p.pixels;
  const auto run = [&]<class Config>(Config, void (*kernel)(typename Config::Params),
                                     int64_t rows) {
    const int64_t tiles =
        m.groups * ((rows - 1) / Config::kTileM + 1) * ((p.out_channels - 1) / Config::kTileN + 1);
    return start<Config>(kernel, p, tiles, how);
  };
  const auto run_packed = [&]<class Config>(Config config) {
    return run(config, conv_packed<Config>, packed_rows(m));
  };
  if (p.packed) {
    if constexpr (kTiles.medium.rows != 0) {
      if (how.tile == TileSize::kMedium) {
        return run_packed(PackedConfig<Engine, ShapeOf<kTiles.medium>, kPackedSlices>());
      }
    }
    return how.tile == TileSize::kNarrow
               ? run_packed(PackedConfig<Engine, ShapeOf<kTiles.narrow>>())
               : run_packed(PackedConfig<Engine, ShapeOf<kTiles.small>>());
  }
  const auto run_plain = [&]<class Config>(Config config) {
    return run(config, conv_sm80<Config>, int64_t{m.block_count()} << m.log2_block());
  };
  return how.tile == TileSize::kLarge ? run_plain(ConvConfig<Engine, ShapeOf<kTiles.large>>())
                                      : run_plain(ConvConfig<Engine, ShapeOf<kTiles.small>>());
}

}  // namespace spamm::kernels::sm80
