// Max pooling in the epilogue of the Hopper convolution: windows of 2 x 2 output pixels with stride
// 2, behind ReLU, where nothing is skipped. The convolution's own output is never in memory.
//
// Boxes are 64 images of one pixel, so the pixels of a window are four boxes. Values are rounded
// before they are compared, as in a pass over the stored output. Where the four boxes are:
//   four boxes to a tile      two warpgroups have a row of the window each
//   two boxes to a tile       the thread blocks of a cluster have a row each, with segments or
//                             without (segments.cuh)
#pragma once

#include "kernels/conv/sm90/conv.cuh"
#include "kernels/conv/sm90/launch.cuh"

namespace spamm::kernels::conv::sm90 {

// kSegmented: a tile has one row of its windows.
template <class Element, int kRows, int kBoxes, int kStages>
struct PoolConfig : Config<Element, kRows, kBoxes, kBlock, kStages> {
  static constexpr bool kAddsResidual = false, kSegmented = kBoxes == 2;
};

template <class Config>
struct PoolTiles {
  // The tile with a window of 2 x 2 pixels in its boxes, or with one row of it. by_box_rows and
  // by_box_columns divide by numbers of windows.
  __device__ __forceinline__ static Tile<Config> at(const ConvParams& p, int number) {
    constexpr int kTilesOfWindow = 4 / Config::kBoxes;
    const int second = number % kTilesOfWindow;
    int windows, channels, row, column, image;
    p.by_channel_tiles(windows, channels, number / kTilesOfWindow);
    p.by_box_columns(windows, column, windows);
    p.by_box_rows(image, row, windows);
    Tile<Config> tile;
    tile.channel = channels * Config::kRows * kBlock;
#pragma unroll
    for (int i = 0; i < Config::kBoxes; ++i) {
      tile.boxes[i] = {image * kBlock, row * 2 + second + i / 2, column * 2 + i % 2};
    }
    return tile;
  }
};

// The larger entries of two pairs; NaN where one is NaN.
template <class Element>
__device__ __forceinline__ uint32_t larger_pair(uint32_t one, uint32_t other) {
  using Pair = decltype(rounded_pair(0.f, 0.f, Element()));
  const Pair result =
      __hmax2_nan(reinterpret_cast<const Pair&>(one), reinterpret_cast<const Pair&>(other));
  return reinterpret_cast<const uint32_t&>(result);
}

// Stages the pooled values of up to kPairs * 4 images and stores those of the output map's box.
// `staging`: neither read nor written by other threads.
template <class Element, int kPairs>
__device__ __forceinline__ void store_pooled(const ConvParams& p, int channel, const Box& window,
                                             OperandBlock& staging,
                                             const uint32_t (&pairs)[kPairs]) {
  stage_pairs(pairs, staging);
  cute::tma_store_fence();
  cutlass::arch::NamedBarrier::sync(128, threadIdx.x / 128);
  if (threadIdx.x % 128 == 0) {
    cute::SM90_TMA_STORE_4D::copy(&p.map_output, &staging, channel, window.column / 2,
                                  window.row / 2, window.image);
    cute::tma_store_arrive();
  }
}

// Waits for both warpgroups of a pair. Warpgroups 2 i and 2 i + 1 are one.
__device__ __forceinline__ void sync_pair(int warpgroup) {
  cutlass::arch::NamedBarrier::sync(256, warpgroup < 2 ? kFirstPairBarrier : kSecondPairBarrier);
}

// Gives the other warpgroup of a pair `given`, and keeps the larger of `kept` and what comes back.
// Afterwards this warpgroup may use blocks[warpgroup ^ 1] until it gets here again.
template <class Element, int kPairs>
__device__ __forceinline__ void exchange(OperandBlock* blocks, int warpgroup,
                                         const uint32_t (&given)[kPairs],
                                         uint32_t (&kept)[kPairs]) {
  const auto quads_of = [&](int of) {
    return reinterpret_cast<uint4*>(blocks[of].bytes) + threadIdx.x % 128;
  };
  if (threadIdx.x % 128 == 0) cute::tma_store_wait<0>();  // of the block that the other one writes
  sync_pair(warpgroup);
#pragma unroll
  for (int i = 0; i < kPairs; i += 4) {
    quads_of(warpgroup)[i / 4 * 128] = {given[i], given[i + 1], given[i + 2], given[i + 3]};
  }
  sync_pair(warpgroup);
#pragma unroll
  for (int i = 0; i < kPairs; i += 4) {
    const uint4 quad = quads_of(warpgroup ^ 1)[i / 4 * 128];
    kept[i] = larger_pair<Element>(kept[i], quad.x);
    kept[i + 1] = larger_pair<Element>(kept[i + 1], quad.y);
    kept[i + 2] = larger_pair<Element>(kept[i + 2], quad.z);
    kept[i + 3] = larger_pair<Element>(kept[i + 3], quad.w);
  }
  cutlass::arch::NamedBarrier::sync(128, threadIdx.x / 128);  // all of the warpgroup have read
}

// A tile of four boxes: each warpgroup has one row of the window and stores half of the images.
template <class Config>
__device__ __forceinline__ void pool_tile(const ConvParams& p, int warpgroup, int channel,
                                          const Box* boxes, const ChannelBias& bias,
                                          Storage<Config>& storage,
                                          const float (&acc)[Config::kValues]) {
  using Element = typename Config::Element;
  constexpr int kPairs = kBlock / 4;
  uint32_t row[kPairs], right[kPairs];
  finish_pairs<Element, 0>(acc, bias, /*relu=*/true, row);
  finish_pairs<Element, kBlock / 2>(acc, bias, /*relu=*/true, right);
#pragma unroll
  for (int i = 0; i < kPairs; ++i) row[i] = larger_pair<Element>(row[i], right[i]);
  const bool is_second = warpgroup % 2 != 0;
  uint32_t kept[kPairs / 2], given[kPairs / 2];
#pragma unroll
  for (int i = 0; i < kPairs / 2; ++i) {
    kept[i] = is_second ? row[kPairs / 2 + i] : row[i];
    given[i] = is_second ? row[i] : row[kPairs / 2 + i];
  }
  exchange<Element>(storage.output, warpgroup, given, kept);
  Box window = boxes[0];
  if (is_second) window.image += kBlock / 2;
  store_pooled<Element>(p, channel, window, storage.output[warpgroup ^ 1], kept);
}

// The sums of four boxes that a thread block finishes for one warpgroup, by sender, box and quad.
// Each quad has four sums of each thread: of 8 images in all.
struct WindowSums {
  static constexpr int kOfBox = BoxSums::kOfThread / 4;

  float4 quads[2 * kOfBox][128];
};

// A tile of two boxes: one row of the window. Its sums are dealt out to the thread blocks of the
// cluster by images, and each thread block adds up its images' segments, pixel by pixel, and stores
// their largest. The number of a thread block has its row in the highest bit, then its segment.
template <class Config>
__device__ __forceinline__ void pool_in_cluster(const ConvParams& p, int warpgroup, int channel,
                                                const Box* boxes, const ChannelBias& bias,
                                                Storage<Config>& storage,
                                                const float (&acc)[Config::kValues]) {
  using Element = typename Config::Element;
  constexpr int kOfBox = WindowSums::kOfBox, kLog2OfBox = 3;
  static_assert(kOfBox == 1 << kLog2OfBox);
  static_assert(sizeof(storage.stages) >= Config::kWarpgroups * sizeof(WindowSums));
  const int log2_blocks = p.log2_segments + 1;
  const int block = blockIdx.x & ((1 << log2_blocks) - 1);
  // Sizes of a box, in each thread block.
  const int log2_quads = kLog2OfBox - log2_blocks, quads = 1 << log2_quads;
  auto& sums = reinterpret_cast<WindowSums*>(storage.stages)[warpgroup];
  const auto place = [&](int sender, int box, int quad) {
    return ((sender * 2 + box) << log2_quads) + quad;
  };

  // Nobody reads stages any more: what was read has gone into products that were waited for.
  wait_for_cluster();
#pragma unroll
  for (int i = 0; i < 2 * kOfBox; ++i) {
    const int quad = i % kOfBox;
    const float4& to = sums.quads[place(block, i / kOfBox, quad & (quads - 1))][threadIdx.x % 128];
    store_quad(cute::set_block_rank(cute::cast_smem_ptr_to_uint(&to), quad >> log2_quads),
               acc + i * 4);
  }
  share_with_cluster();

  uint32_t pairs[kOfBox] = {};  // two of each quad, with at least two thread blocks
#pragma unroll
  for (int quad = 0; quad < kOfBox / 2; ++quad) {
    if (quad >= quads) break;
#pragma unroll
    for (int pixel = 0; pixel < 4; ++pixel) {
      float total[4] = {};
      for (int segment = 0; segment < 1 << p.log2_segments; ++segment) {
        const int sender = (pixel / 2 << p.log2_segments) + segment;
        const float4& from = sums.quads[place(sender, pixel % 2, quad)][threadIdx.x % 128];
        total[0] += from.x;
        total[1] += from.y;
        total[2] += from.z;
        total[3] += from.w;
      }
      uint32_t of_pixel[2];
      finish_pairs<Element, 0>(total, bias, /*relu=*/true, of_pixel);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        uint32_t& kept = pairs[quad * 2 + i];
        kept = pixel == 0 ? of_pixel[i] : larger_pair<Element>(kept, of_pixel[i]);
      }
    }
  }
  Box window = boxes[0];
  window.image += block * quads * 8;
  store_pooled<Element>(p, channel, window, storage.output[warpgroup], pairs);
}

template <class Config_>
struct PoolKernel : BoxKernel<Config_> {
  using Config = Config_;
  using Tiles = PoolTiles<Config>;

  __device__ __forceinline__ static void finish(const ConvParams& p, int warpgroup, int channel,
                                                const Box* boxes, Storage<Config>& storage,
                                                const float (&acc)[Config::kValues]) {
    ChannelBias bias;
    bias.load(p, channel, static_cast<const typename Config::Element*>(p.bias));
    if constexpr (Config::kSegmented) {
      pool_in_cluster<Config>(p, warpgroup, channel, boxes, bias, storage, acc);
    } else {
      pool_tile<Config>(p, warpgroup, channel, boxes, bias, storage, acc);
    }
  }
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    conv_pool_sm90(const __grid_constant__ ConvParams p) {
  run<ConvRoles<PoolKernel<Config>>>(p);
}

template <class Config>
cudaError_t convolve_and_pool_staged(ConvParams p, const void* input, const void* weight,
                                     const Launch& how) {
  const int rows = p.boxes.rows / 2, columns = p.boxes.columns / 2;
  p.by_box_rows = Divisor(rows);
  p.by_box_columns = Divisor(columns);
  p.channel_tiles = ceil_div(p.shape.out_channels, Config::kRows * kBlock);
  p.by_channel_tiles = Divisor(p.channel_tiles);
  p.tiles = p.channel_tiles * p.boxes.images * rows * columns * (4 / Config::kBoxes);
  // A cluster has a tile for each row of a window.
  const int segments = Config::kSegmented ? 1 << p.log2_segments : 1;
  const int cluster = Config::kSegmented ? 2 * segments : 0;
  const int blocks = Config::kSegmented ? p.tiles : std::min(p.tiles, how.multiprocessors);
  if (blocks == p.tiles) p.next_tile = nullptr;
  cudaError_t error = encode_operands<Config>(p, input, weight);
  if (error == cudaSuccess) {  // a warpgroup stores its images of pooled values at a time
    const auto& [images, height, width] = p.shape.output;
    error = encode_pixels<typename Config::Element>(
        p.map_output, p.output, {images, height / 2, width / 2}, p.shape.out_channels, p.box,
        {1, 1}, kBlock / 2 / segments);
  }
  if (error != cudaSuccess) return error;
  return start<ConvRoles<PoolKernel<Config>>>(conv_pool_sm90<Config>, p, blocks * segments, cluster,
                                              how.stream);
}

template <class Element, TileConfig kTile>
constexpr auto pooling() {
  using Chosen = PoolConfig<Element, kTile.rows / kBlock, kTile.columns / kBlock, kTile.stages>;
  static_assert(kHasTile<Chosen, kTile>);
  return convolve_and_pool_staged<Chosen>;
}

// Like convolve(), with ReLU and max pooling with stride 2: `output` is the pooled one. Half types;
// a pixel block is 64 images of one pixel; rows and columns of the convolution's output are even;
// no residual, no output norms.
template <class Element, Tiles kTiles>
cudaError_t convolve_and_pool(ConvParams p, const void* input, const void* weight,
                              const Launch& how) {
  complete(p);
  const bool large = how.tile == TileSize::kLarge && p.log2_segments == 0;
  const auto instance = how.tile == TileSize::kNarrow ? pooling<Element, kTiles.narrow>()
                        : large                       ? pooling<Element, kTiles.large>()
                                                      : pooling<Element, kTiles.small>();
  return instance(p, input, weight, how);
}

}  // namespace spamm::kernels::conv::sm90
