// clang-format off
// Hopper's convolution where nothing is skipped, of half types and of float32 with TF32's precision:
// no lists, no norms, no boxes. A tile is kRows x 64 output channels x kPixels consecutive output
// pixels of all images, so pictures of any size fill it. TMA's im2col mode finds the pixels that
// they read at a kernel position.
// The two thread blocks of a persistent cluster share the weights of one channel tile, or the
// pixels of one pixel tile: each loads half into both. Roles:
//   load threads  fetch weights and pixels of each step, then the residual, into the ring
//   warpgroups    multiply, two products in flight; add the residual; TMA stores the result
// Sums are added in the order of conv.cuh's, whatever the tile. Limits: takes_unskipped().
// clang-format on
#pragma once

#include <cute/arch/cluster_sm90.hpp>
#include <cute/arch/copy_sm90_desc.hpp>
#include <cute/arch/copy_sm90_tma.hpp>

#include "kernels/common/overlap.cuh"
#include "kernels/common/tile.h"
#include "kernels/conv/sm90/conv.cuh"
#include "kernels/conv/sm90/launch.cuh"

namespace spamm::kernels::conv::sm90 {

struct ClusterPlace {
  int rank, channel, pixel;  // the last two: which of two tiles it has, along each

  __device__ explicit ClusterPlace(const UnskippedParams& p)
      : rank(blockIdx.x % 2),
        channel(p.shares_weights ? 0 : rank),
        pixel(p.shares_weights ? rank : 0) {}
};

// kCount lines of channels, 64 of half types or 32 of float32, in TMA's 128-byte swizzle.
template <int kCount>
struct alignas(1024) Lines {
  static_assert(kCount % 8 == 0);
  uint8_t bytes[kCount * kLineBytes];

  // The lines from `first` on, a multiple of 8.
  __device__ OperandBlock& from(int first) {
    return *reinterpret_cast<OperandBlock*>(bytes + first * kLineBytes);
  }
};

// Two warpgroups have 64 channels each of all pixels (kRows = 2), or half of the pixels each.
template <class Element_, int kRows_, int kPixels_>
struct UnskippedConfig {
  using Element = Element_;
  using Operand = std::conditional_t<std::is_same_v<Element, float>, Tf32, Element>;
  // Channels of a step, and lines of 64 channels of the output.
  static constexpr int kDepth = kLineBytes / sizeof(Element), kLines = kBlock / kDepth;
  static constexpr int kRows = kRows_, kPixels = kPixels_;
  static constexpr int kWarpgroups = UnskippedTile::kWarpgroups;
  static constexpr int kThreads = 128 * (1 + kWarpgroups), kListWarps = 0;
  static constexpr UnskippedTile kTile = {kRows * kBlock, kPixels};
  static constexpr int kWidth = kTile.width();    // pixels of a warpgroup
  static constexpr int kValues = kWidth / 2;      // sums in each thread
  static constexpr int kStored = kTile.stored();  // in a store
  static constexpr int kStagings = UnskippedTile::kStagings;
  static constexpr int kMultiplyRegisters = 232, kOtherRegisters = 40;
  static constexpr auto kNextKernel = kernels::sm90::NextKernel::kAtOnce;

  static constexpr int kStages = kTile.stages(sizeof(Element));
  static_assert(kTile.exists(sizeof(Element)));
  static_assert(kStored % 8 == 0 && kWidth / kStored % kStagings == 0);
};

// Pixels of 64 channels of the output, on their way to memory.
template <class Config>
struct StagedPortion {
  Lines<Config::kStored> lines[Config::kLines];
};

template <class Config>
struct UnskippedStorage {
  struct Stage {
    Lines<Config::kRows * kBlock> weight;
    Lines<Config::kPixels> pixels;
  };

  Stage stages[Config::kStages];
  StagedPortion<Config> output[Config::kWarpgroups][Config::kStagings];
  Barrier full[Config::kStages], empty[Config::kStages];

  // A stage is filled by its thread block's weights and by the pixels of both thread blocks, and
  // emptied by the multiplying warps of both. So neither gets a whole stage ahead of the other,
  // even where each brings its own residual.
  __device__ void initialize() {
    for (int i = 0; i < Config::kStages; ++i) {
      full[i].init(3);
      empty[i].init(2 * 4 * Config::kWarpgroups);
    }
    cutlass::arch::fence_barrier_init();
  }
};

// Walks through the thread block's tiles. Those of a cluster are neighbours.
template <class Config>
class TileWalk {
 public:
  int channel, pixel;  // the tile's first; pixels are numbered through all images

  __device__ __forceinline__ TileWalk(const UnskippedParams& p, const ClusterPlace& place)
      : p_(p), place_(place), number_(blockIdx.x / 2) {
    locate();
  }

  __device__ __forceinline__ bool has_tile() const { return number_ < p_.tiles; }
  __device__ __forceinline__ void advance() {
    number_ += gridDim.x / 2;
    locate();
  }

 private:
  __device__ __forceinline__ void locate() {
    int pixels, channels;
    p_.by_channel_tiles(pixels, channels, number_);
    channel = (channels * (p_.shares_weights ? 1 : 2) + place_.channel) * Config::kRows * kBlock;
    pixel = (pixels * (p_.shares_weights ? 2 : 1) + place_.pixel) * Config::kPixels;
  }

  const UnskippedParams& p_;
  const ClusterPlace& place_;
  int number_;
};

// The start of an output pixel's window in the input.
struct Window {
  int image, row, column;

  Window() = default;
  __device__ Window(const UnskippedParams& p, int pixel) {
    int line;
    p.by_box_columns(line, column, pixel);
    p.by_box_rows(image, row, line);
    row = row * p.shape.stride.rows - p.shape.padding.rows;
    column = column * p.shape.stride.columns - p.shape.padding.columns;
  }
};

// The thread that loads the weights (kWeights), or the pixels and the residual.
template <class Config, bool kWeights>
class UnskippedLoader {
  static constexpr int kHalfRows = Config::kRows * kBlock / 2, kHalfPixels = Config::kPixels / 2;
  static constexpr uint16_t kBoth = 0b11;  // a bit for each thread block

 public:
  __device__ UnskippedLoader(const UnskippedParams& p, UnskippedStorage<Config>& storage)
      : p_(p), storage_(storage), place_(p) {}

  __device__ void run() {
    wait_for_previous_kernel();
    for (TileWalk<Config> tile(p_, place_); tile.has_tile(); tile.advance()) {
      if constexpr (!kWeights) {
        if (!p_.in_order) {
          windows_[0] = Window(p_, tile.pixel + (is_shared() ? place_.rank : 0) * kHalfPixels);
          windows_[1] = Window(p_, tile.pixel + kHalfPixels);
        }
      }
      int position = 0;
      for (int row = 0; row < p_.shape.kernel.rows; ++row) {
        for (int column = 0; column < p_.shape.kernel.columns; ++column, ++position) {
          for (int group = 0; group < p_.box_groups; ++group) {
            load_step(tile, row, column, position, group * Config::kDepth);
          }
        }
      }
      if (p_.residual == nullptr) continue;
      for (int line = 0; line < Config::kRows * Config::kLines; ++line) {
        load_residual(tile, line * Config::kDepth);
      }
    }
    // The thread block stays until the other one has released its stages for the last time.
    for (int i = 0; i < Config::kStages; ++i) {
      storage_.empty[at_.slot].wait(at_.phase ^ 1);
      at_.advance();
    }
  }

 private:
  __device__ uint64_t* barrier() { return reinterpret_cast<uint64_t*>(&storage_.full[at_.slot]); }

  __device__ void announce(uint32_t bytes) {
    storage_.empty[at_.slot].wait(at_.phase ^ 1);
    Barrier& full = storage_.full[at_.slot];
    full.arrive_and_expect_tx(bytes);
    if constexpr (!kWeights) full.arrive(place_.rank ^ 1);
  }

  __device__ bool is_shared() const { return p_.shares_weights == kWeights; }

  // Calls load(half, number) for the halves of the operand that this thread block loads. Where it
  // shares the operand, that is a single one: the other comes from the other thread block.
  template <class Load>
  __device__ void for_each_half(const Load& load) const {
    if (is_shared()) {
      load(place_.rank, 0);
    } else {
      load(0, 0);
      load(1, 1);
    }
  }

  __device__ void load_step(const TileWalk<Config>& tile, int row, int column, int position,
                            int channel) {
    auto& stage = storage_.stages[at_.slot];
    if constexpr (kWeights) {
      announce(sizeof(stage.weight));
      for_each_half([&](int half, int) {
        auto* to = &stage.weight.from(half * kHalfRows);
        const int first = tile.channel + half * kHalfRows;
        if (is_shared()) {
          cute::SM90_TMA_LOAD_MULTICAST_3D::copy(&p_.map_weight, barrier(), kBoth, kCacheHint, to,
                                                 channel, position, first);
        } else {
          cute::SM90_TMA_LOAD_3D::copy(&p_.map_weight, barrier(), kCacheHint, to, channel, position,
                                       first);
        }
      });
    } else {
      announce(sizeof(stage.pixels));
      for_each_half([&](int half, int number) {
        auto* to = &stage.pixels.from(half * kHalfPixels);
        if (p_.in_order) {
          load_in_order(to, channel, tile.pixel + half * kHalfPixels);
        } else {
          load_windows(to, channel, windows_[number], row * p_.shape.dilation.rows,
                       column * p_.shape.dilation.columns);
        }
      });
    }
    at_.advance();
  }

  __device__ void load_in_order(void* to, int channel, int pixel) {
    if (is_shared()) {
      cute::SM90_TMA_LOAD_MULTICAST_2D::copy(&p_.map_input, barrier(), kBoth, kCacheHint, to,
                                             channel, pixel);
    } else {
      cute::SM90_TMA_LOAD_2D::copy(&p_.map_input, barrier(), kCacheHint, to, channel, pixel);
    }
  }

  __device__ void load_windows(void* to, int channel, const Window& window, int row, int column) {
    const auto down = static_cast<uint16_t>(row), right = static_cast<uint16_t>(column);
    if (is_shared()) {
      cute::SM90_TMA_LOAD_IM2COL_MULTICAST_4D::copy(&p_.map_input, barrier(), kBoth, to, channel,
                                                    window.column, window.row, window.image, right,
                                                    down);
    } else {
      cute::SM90_TMA_LOAD_IM2COL_4D::copy(&p_.map_input, barrier(), to, channel, window.column,
                                          window.row, window.image, right, down);
    }
  }

  // A stage with a line of the residual's channels in place of the pixels, from `channel` of the
  // tile on.
  __device__ void load_residual(const TileWalk<Config>& tile, int channel) {
    auto& pixels = storage_.stages[at_.slot].pixels;
    announce(kWeights ? 0 : sizeof(pixels));
    if constexpr (!kWeights) {
#pragma unroll
      for (int first = 0; first < Config::kPixels; first += Config::kStored) {
        cute::SM90_TMA_LOAD_2D::copy(&p_.map_residual, barrier(), kCacheHint, &pixels.from(first),
                                     tile.channel + channel, tile.pixel + first);
      }
    }
    at_.advance();
  }

  const UnskippedParams& p_;
  UnskippedStorage<Config>& storage_;
  RingPosition<Config::kStages> at_;
  ClusterPlace place_;
  Window windows_[2];  // of the halves that this thread block loads
};

// Returns a stage to the load threads of both thread blocks.
__device__ __forceinline__ void release_to_cluster(const Barrier& empty) {
  __syncwarp();
  const int lane = threadIdx.x % 32;
  empty.arrive(lane, lane < 2);
  __syncwarp();
}

// Stores the pixels from kFirst on of a warpgroup's sums, in portions of kStored.
template <class Config, int kFirst = 0>
__device__ __forceinline__ void store_portions(const UnskippedParams& p, int channel, int pixel,
                                               StagedPortion<Config> (&stagings)[Config::kStagings],
                                               const ChannelBias& bias, bool relu,
                                               float (&acc)[Config::kValues]) {
  if constexpr (kFirst < Config::kWidth) {
    const bool leads = threadIdx.x % 128 == 0;
    const int warpgroup = threadIdx.x / 128;
    auto& lines = stagings[kFirst / Config::kStored % Config::kStagings].lines;
    // Until the last store from here has read shared memory.
    const auto wait = [&] {
      if (leads) cute::tma_store_wait<Config::kStagings - 1>();
      cutlass::arch::NamedBarrier::sync(128, warpgroup);
    };
    if constexpr (Config::kLines == 1) {
      uint32_t pairs[Config::kStored / 4];
      finish_pairs<typename Config::Element, kFirst / 2>(acc, bias, relu, pairs);
      wait();
      stage_pairs(pairs, lines[0].from(0));
    } else {
      wait();
      stage<Config::kStored, kFirst / 2>(acc, bias, relu, lines[line_of_warp()].from(0));
    }
    cute::tma_store_fence();
    cutlass::arch::NamedBarrier::sync(128, warpgroup);
    if (leads) {
#pragma unroll
      for (int i = 0; i < Config::kLines; ++i) {
        cute::SM90_TMA_STORE_2D::copy(&p.map_output, &lines[i], channel + i * Config::kDepth,
                                      pixel + kFirst);
      }
      cute::tma_store_arrive();
    }
    __syncwarp();
    store_portions<Config, kFirst + Config::kStored>(p, channel, pixel, stagings, bias, relu, acc);
  }
}

// Adds a line of channels of the residual to a warpgroup's sums.
template <class Config>
__device__ __forceinline__ void add_line(const OperandBlock& pixels, int line,
                                         float (&acc)[Config::kValues]) {
  if constexpr (Config::kLines == 1) {
    add_box<typename Config::Element, Config::kWidth, 0>(pixels, acc);
  } else if (line == line_of_warp()) {
    add_values<Config::kWidth>(pixels, acc);
  }
}

// `warpgroup` counts the multiplying warpgroups.
template <class Config>
__device__ __forceinline__ void multiply_unskipped(const UnskippedParams& p, int warpgroup,
                                                   UnskippedStorage<Config>& storage) {
  using Element = typename Config::Element;
  using kernels::sm90::Major;
  using kernels::sm90::ScaleOut;
  using Stage = typename UnskippedStorage<Config>::Stage;
  using Descriptor = kernels::sm90::StagedDescriptor<Major::K, Stage, Config::kStages>;
  // The warpgroup's part of a tile.
  const int channel = Config::kRows == 2 ? warpgroup * kBlock : 0;
  const int pixel = Config::kRows == 2 ? 0 : warpgroup * Config::kWidth;
  Stage& first = storage.stages[0];
  Descriptor weight(first.weight.from(channel)), pixels(first.pixels.from(pixel));
  RingPosition<Config::kStages> at;
  const auto advance = [&] {
    at.advance();
    weight.advance(at.slot == 0);
    pixels.advance(at.slot == 0);
  };
  const int steps = p.steps;
  const ClusterPlace place(p);
  for (TileWalk<Config> tile(p, place); tile.has_tile(); tile.advance()) {
    float acc[Config::kValues];
    ChannelBias bias;
    int before = 0;  // the slot of the step before
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      storage.full[at.slot].wait(at.phase);
      cute::warpgroup_arrive();
      kernels::sm90::multiply_columns<typename Config::Operand, Major::K, Major::K, 0,
                                      Config::kWidth, 0, Config::kDepth>(
          *weight, *pixels, acc, step == 0 ? ScaleOut::Zero : ScaleOut::One);
      cute::warpgroup_commit_batch();
      if (step == 0) {  // the kernel ahead has ended, and the products hide the wait
        bias.load(p, tile.channel + channel, static_cast<const Element*>(p.bias));
      }
      cute::warpgroup_wait<1>();
      if (step > 0) release_to_cluster(storage.empty[before]);
      before = at.slot;
      advance();
    }
    cute::warpgroup_wait<0>();
    release_to_cluster(storage.empty[before]);
    if (p.residual != nullptr) {
#pragma unroll
      for (int line = 0; line < Config::kRows * Config::kLines; ++line) {
        storage.full[at.slot].wait(at.phase);
        if (Config::kRows == 1 || line / Config::kLines == warpgroup) {
          add_line<Config>(storage.stages[at.slot].pixels.from(pixel), line % Config::kLines, acc);
        }
        release_to_cluster(storage.empty[at.slot]);
        advance();
      }
    }
    const bool relu = activate_sums(p.activation, bias, acc);
    store_portions<Config>(p, tile.channel + channel, tile.pixel + pixel, storage.output[warpgroup],
                           bias, relu, acc);
  }
  if (threadIdx.x % 128 == 0) cute::tma_store_wait<0>();  // stores still read shared memory
}

template <class Config_>
struct UnskippedRoles {
  using Config = Config_;
  using Params = UnskippedParams;
  using Storage = UnskippedStorage<Config>;
  const UnskippedParams& p;
  Storage& storage;

  // The barriers of both thread blocks are initialised before any is used.
  __device__ __forceinline__ void set_up(int warp) const {
    if (warp == 0 && threadIdx.x == 0) {
      cute::prefetch_tma_descriptor(&p.map_input);
      cute::prefetch_tma_descriptor(&p.map_weight);
      cute::prefetch_tma_descriptor(&p.map_output);
      storage.initialize();
    }
    wait_for_cluster();  // what is initialised is fenced
  }
  __device__ __forceinline__ void load_a() const {
    UnskippedLoader<Config, true>(p, storage).run();
  }
  __device__ __forceinline__ void load_b() const {
    UnskippedLoader<Config, false>(p, storage).run();
  }
  __device__ __forceinline__ void list(int) const {}
  __device__ __forceinline__ void multiply(int warp) const {
    multiply_unskipped<Config>(p, kernels::sm90::multiplying_warpgroup(warp), storage);
  }
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    conv_unskipped_sm90(const __grid_constant__ UnskippedParams p) {
  run<UnskippedRoles<Config>>(p);
}

// ---- Launch ------------------------------------------------------------------------------------

// Encodes a map of all pixels of channels-last images in the order of memory.
template <class Element>
cudaError_t encode_lines(CUtensorMap& map, const void* data, int channels, int pixels,
                         uint32_t box_pixels) {
  return kernels::sm90::encode_tensor_map<Element, 2>(
      map, data, {static_cast<uint64_t>(channels), static_cast<uint64_t>(pixels)},
      {channels * sizeof(Element)}, {kLineBytes / sizeof(Element), box_pixels}, {1, 1});
}

// Encodes a map of the pixels that consecutive output pixels read.
template <class Element>
cudaError_t encode_windows_of_pixels(CUtensorMap& map, const void* data, const ConvShape& shape,
                                     uint32_t pixels) {
  const Extent& input = shape.input;
  const uint64_t line = shape.channels * sizeof(Element);
  const auto past = [](int kernel, int dilation, int padding) {
    return padding - (kernel - 1) * dilation;
  };
  return kernels::sm90::encode_im2col_map<Element>(
      map, data,
      {static_cast<uint64_t>(shape.channels), static_cast<uint64_t>(input.columns),
       static_cast<uint64_t>(input.rows), static_cast<uint64_t>(input.images)},
      {line, line * input.columns, line * input.columns * input.rows},
      {-shape.padding.columns, -shape.padding.rows},
      {past(shape.kernel.columns, shape.dilation.columns, shape.padding.columns),
       past(shape.kernel.rows, shape.dilation.rows, shape.padding.rows)},
      pixels,
      {static_cast<uint32_t>(shape.stride.columns), static_cast<uint32_t>(shape.stride.rows)});
}

template <class Config>
cudaError_t convolve_unskipped(UnskippedParams p, const void* input, const void* weight,
                               int multiprocessors, cudaStream_t stream) {
  using Element = typename Config::Element;
  using Operand = typename Config::Operand;
  const ConvShape& shape = p.shape;
  const int pixels = shape.output.images * shape.output.rows * shape.output.columns;
  p.box_groups = ceil_div(shape.channels, Config::kDepth);
  p.steps = shape.kernel.rows * shape.kernel.columns * p.box_groups;
  p.by_box_rows = Divisor(shape.output.rows);
  p.by_box_columns = Divisor(shape.output.columns);
  p.in_order = reads_pixels_in_order(shape);
  const int channels = Config::kRows * kBlock * (p.shares_weights ? 1 : 2);
  p.channel_tiles = ceil_div(shape.out_channels, channels);
  p.by_channel_tiles = Divisor(p.channel_tiles);
  p.tiles = p.channel_tiles * ceil_div(pixels, Config::kPixels * (p.shares_weights ? 2 : 1));

  constexpr uint32_t kHalfPixels = Config::kPixels / 2, kHalfChannels = Config::kRows * kBlock / 2;
  const auto encode_result = [&](CUtensorMap& map, const void* data) {
    return encode_lines<Element>(map, data, shape.out_channels, pixels, Config::kStored);
  };
  cudaError_t error =
      p.in_order ? encode_lines<Operand>(p.map_input, input, shape.channels, pixels, kHalfPixels)
                 : encode_windows_of_pixels<Operand>(p.map_input, input, shape, kHalfPixels);
  if (error == cudaSuccess) error = encode_result(p.map_output, p.output);
  if (error == cudaSuccess && p.residual != nullptr) {
    error = encode_result(p.map_residual, p.residual);
  }
  if (error == cudaSuccess) {
    error = encode_weight<Operand>(p.map_weight, weight, shape, kHalfChannels);
  }
  if (error != cudaSuccess) return error;

  constexpr int kCluster = 2;
  const int clusters = std::min(p.tiles, std::max(multiprocessors / kCluster, 1));
  return start<UnskippedRoles<Config>>(conv_unskipped_sm90<Config>, p, clusters * kCluster,
                                       kCluster, stream);
}

// Calls the instance of `tile`, one of kTiles.
template <class Element, const auto& kTiles, size_t kNumber = 0>
cudaError_t convolve_unskipped(const UnskippedTile& tile, const UnskippedParams& p,
                               const void* input, const void* weight, int multiprocessors,
                               cudaStream_t stream) {
  if constexpr (kNumber == std::size(kTiles)) {
    return cudaErrorInvalidValue;
  } else {
    constexpr UnskippedTile kTile = kTiles[kNumber];
    if constexpr (kTile.exists(sizeof(Element))) {
      if (tile == kTile) {
        using Chosen = UnskippedConfig<Element, kTile.channels / kBlock, kTile.pixels>;
        return convolve_unskipped<Chosen>(p, input, weight, multiprocessors, stream);
      }
    }
    return convolve_unskipped<Element, kTiles, kNumber + 1>(tile, p, input, weight, multiprocessors,
                                                            stream);
  }
}

}  // namespace spamm::kernels::conv::sm90
