// The convolution of few input channels, such as a network's first layer. Half types, float32 sums.
// What it writes bounds it: the input of a tile is read once for all windows that share it, and
// while the products of the tile before run. What is skipped counts as zero (kMasked).
//
// A warpgroup multiplies 64 pixels with 64 output channels at a time. The pixels' windows go from
// shared memory into registers, a word at a time, as the first operand of wgmma; the weights rest
// in shared memory. The windows of one product all begin at even entries of memory, or all at odd
// ones. A thread gets 2 x 8 neighbouring channels of two pixels, 16 bytes each, and stores them as
// they are. A pixel has the same bits whatever it shares a product with.
#pragma once

#include <cstdint>

#include "kernels/common/launch.cuh"
#include "kernels/common/overlap.cuh"
#include "kernels/common/wgmma_sm90.cuh"
#include "kernels/conv/sm90/epilogue.cuh"
#include "kernels/conv/sm90/few_channels_operands.cuh"
#include "kernels/conv/sm90/few_channels_plan.h"
#include "kernels/conv/sm90/norms.cuh"

namespace spamm::kernels::conv::sm90 {

// Adds the squares of two stored values.
template <class Element>
__device__ __forceinline__ void add_squares(SquareSum<Element>& sum, uint32_t pair) {
  const SquareSum<Element> low = widen(__builtin_bit_cast(Element, static_cast<uint16_t>(pair)));
  const SquareSum<Element> high =
      widen(__builtin_bit_cast(Element, static_cast<uint16_t>(pair >> 16)));
  sum = fma(high, high, fma(low, low, sum));
}

// A warp's 16 pixels, of which lane l has numbers l / 4 and l / 4 + 8.
struct PixelStrip {
  uint32_t window;  // where the window of the lane's first pixel begins in shared memory
  int64_t output;   // where that pixel begins in the output
  int left;         // how many pixels exist from that one on
};

template <class Element, int kSteps, bool kMasked>
class FewChannels {
 public:
  __device__ FewChannels(const FewChannelsParams& p, uint8_t* shared)
      : p_(p),
        weights_(reinterpret_cast<OperandBlock*>(shared)),
        bias_(reinterpret_cast<float*>(weights_ + p.plan.window.parities * p.plan.weight_blocks())),
        slopes_(bias_ + 64),
        places_(reinterpret_cast<PairPlace*>(slopes_ + 64)),
        patches_(
            reinterpret_cast<uint16_t*>(places_ + p.plan.window.parities * p.plan.all_steps() * 8)),
        ranks_(reinterpret_cast<PixelRanks*>(patches_ + 2 * p.plan.patch())),
        warpgroup_(__shfl_sync(~0u, threadIdx.x / 128, 0)),
        parity_(p.plan.window.parities == 2 ? warpgroup_ : 0),
        first_channel_(blockIdx.y * 64) {
    const FewChannelsPlan& plan = p.plan;
    column_bytes_ = 2 * p.shape.stride.columns * p.shape.channels;
    pixel_bytes_ = plan.along_images ? 2 * plan.image : plan.window.parities * column_bytes_;
    pixel_output_ =
        static_cast<int64_t>(p.shape.out_channels) *
        (plan.along_images ? p.shape.output.rows * p.shape.output.columns : plan.window.parities);
  }

  // Computes the tiles of the thread block. While it multiplies one, it fetches the next.
  __device__ void run() {
    int number = blockIdx.x, buffer = 0;
    for (int next = blockIdx.x;; next += gridDim.x, buffer ^= 1) {
      if (next < p_.tiles) copy_patch(p_, FewChannelsTile(p_, next), patch(buffer));
      commit_copies();
      if (next == blockIdx.x) {
        const Element bias = load_bias();  // on its way with the weights
        stage_weights(p_, first_channel_, weights_);
        if constexpr (kMasked) order_positions(p_, first_channel_, *ranks_);
        stage_places<kMasked>(p_, places_, *ranks_);
        if (threadIdx.x < 64) {
          bias_[threadIdx.x] = widen(bias);
          slopes_[threadIdx.x] = p_.slopes.of(first_channel_ + threadIdx.x, p_.shape.out_channels);
        }
        cutlass::arch::fence_view_async_shared();  // wgmma reads the weights
      } else {
        multiply_tile(FewChannelsTile(p_, number), shared_address(patch(buffer ^ 1)));
      }
      if (next >= p_.tiles) return;
      number = next;
      wait_copies<0>();
      __syncthreads();  // this patch is complete, and all have read the one before
      if constexpr (kMasked) rank_pixels(p_, {p_, next}, *ranks_, ranks_of_entries());
    }
  }

 private:
  static constexpr int kTogether = kSteps % 5 == 0 ? 5 : kSteps;  // steps in one group of products
  static constexpr uint32_t kBlockUnits = sizeof(OperandBlock) / kernels::sm90::kDescriptorUnit;
  static constexpr uint32_t kStepUnits = 32 / kernels::sm90::kDescriptorUnit;

  __device__ uint16_t* patch(int buffer) const { return patches_ + buffer * p_.plan.patch(); }

  __device__ uint8_t* ranks_of_entries() const { return reinterpret_cast<uint8_t*>(ranks_ + 1); }

  // The bias of a channel for each of the first 64 threads.
  __device__ Element load_bias() const {
    const int channel = first_channel_ + threadIdx.x;
    const bool exists = p_.bias != nullptr && threadIdx.x < 64 && channel < p_.shape.out_channels;
    const auto* biases = static_cast<const uint16_t*>(p_.bias);
    return __builtin_bit_cast(Element,
                              static_cast<uint16_t>(load_two_bytes(biases + channel, exists)));
  }

  // The places of the thread's pairs in the steps of a pass.
  __device__ void load_places(int pass) {
    const auto* from =
        places_ + (parity_ * p_.plan.all_steps() + pass * kSteps) * 8 + threadIdx.x % 4 * 2;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int i = 0; i < 2; ++i) of_steps_[step][i] = from[step * 8 + i];
    }
  }

  // `patch`: its address in shared memory.
  __device__ void multiply_tile(const FewChannelsTile& tile, uint32_t patch) {
    from_half_ = shared_address(ranks_of_entries()) - patch / 2;
    const FewChannelsPlan& plan = p_.plan;
    const Extent& output = p_.shape.output;
    // The first pixel of the lane, if it were in the tile's first strip.
    const int lane_pixel = threadIdx.x % 32 / 4;
    const int64_t line = static_cast<int64_t>(tile.image) * output.rows + tile.row;
    PixelStrip origin = {
        patch + 2 * (tile.skew - plan.window.lead(parity_)) + lane_pixel * pixel_bytes_,
        (line * output.columns + tile.column) * p_.shape.out_channels + lane_pixel * pixel_output_,
        -lane_pixel};
    // Else the compiler computes it again for every strip.
    asm volatile("" : "+r"(origin.window), "+l"(origin.output));
    // Along images both warpgroups compute all images, in columns of their own; and where columns
    // have parities all strips, in one parity each.
    const bool all = plan.along_images || plan.window.parities == 2;
    const int images = min(kImageTile, output.images - tile.image);
    const int strips = plan.along_images
                           ? (images + kStripPixels - 1) / kStripPixels * kStripsOfProduct
                           : plan.rows * plan.strips;
    if (plan.passes == 1) load_places(0);
    SquareSum<Element> squares = 0;
    for (int first = all ? 0 : warpgroup_ * kStripsOfProduct; first < strips;
         first += (all ? 1 : kFewChannelsWarpgroups) * kStripsOfProduct) {
      const PixelStrip strip = plan.along_images
                                   ? strip_of_images(tile, origin, first / kStripsOfProduct)
                                   : strip_of_columns(tile, origin, first + threadIdx.x / 32 % 4);
      float acc[kernels::sm90::kThreadValues];
      multiply(strip.window, acc);
      store(strip, acc, squares);
    }
    if (p_.norms != nullptr) store_norm(tile, squares);
  }

  // The column of a tile along images that the warp computes.
  __device__ int column_of_warp() const { return threadIdx.x / 32 % 4 * 2 + warpgroup_; }

  __device__ PixelStrip strip_of_images(const FewChannelsTile& tile, const PixelStrip& origin,
                                        int number) const {
    const int column = column_of_warp(), image = number * kStripPixels;
    const bool exists = tile.column + column < p_.shape.output.columns;
    return {origin.window + image * pixel_bytes_ + column * column_bytes_,
            origin.output + image * pixel_output_ + column * p_.shape.out_channels,
            origin.left + (exists ? p_.shape.output.images - tile.image - image : 0)};
  }

  __device__ PixelStrip strip_of_columns(const FewChannelsTile& tile, const PixelStrip& origin,
                                         int number) const {
    const FewChannelsPlan& plan = p_.plan;
    const Extent& output = p_.shape.output;
    int row, strip;
    p_.by_strips(row, strip, number);
    const int parities = plan.window.parities, column = strip * kStripPixels * parities + parity_;
    const int columns = output.columns - tile.column - column;
    const bool exists = row < plan.rows && tile.row + row < output.rows;
    row = min(row, plan.rows - 1);  // what does not exist is multiplied nevertheless
    return {
        origin.window + row * plan.output_step * plan.line * 2 + column * column_bytes_,
        origin.output + static_cast<int64_t>(row * output.columns + column) * p_.shape.out_channels,
        origin.left + (exists ? (columns + parities - 1) >> (parities - 1) : 0)};
  }

  // acc = the windows at `window` times the weights.
  __device__ __forceinline__ void multiply(uint32_t window, float (&acc)[32]) {
    namespace wgmma = kernels::sm90;
    auto weights = wgmma::descriptor<wgmma::Major::K>(weights_[parity_ * p_.plan.weight_blocks()]);
    __syncwarp();  // lanes may have parted ways where pixels do not exist
#pragma unroll 1
    for (int pass = 0; pass < p_.plan.passes; ++pass) {
      if (p_.plan.passes > 1) load_places(pass);
      uint32_t a[kSteps][4];
#pragma unroll
      for (int first = 0; first < kSteps; first += kTogether) {
#pragma unroll
        for (int step = first; step < first + kTogether; ++step) gather(window, step, a[step]);
        cute::warpgroup_arrive();
#pragma unroll
        for (int step = first; step < first + kTogether; ++step) {
          const bool starts = step == 0 && pass == 0;
          wgmma::multiply_registers<Element>(
              a[step], wgmma::advance(weights, step / 4 * kBlockUnits + step % 4 * kStepUnits), acc,
              starts ? wgmma::ScaleOut::Zero : wgmma::ScaleOut::One);
        }
        cute::warpgroup_commit_batch();
      }
      weights = wgmma::advance(weights, kSteps / 4 * kBlockUnits);
      cute::warpgroup_wait<0>();
      wgmma::keep_operands(a);
    }
  }

  // The thread's entries of both pixels in a step.
  __device__ __forceinline__ void gather(uint32_t window, int step, uint32_t (&a)[4]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const PairPlace place = of_steps_[step][i];
      const uint32_t from = window + place.distance();
      a[2 * i] = load_pair(place, from);
      a[2 * i + 1] = load_pair(place, from + 8 * pixel_bytes_);
    }
  }

  __device__ __forceinline__ uint32_t load_pair(PairPlace place, uint32_t from) const {
    const uint32_t pair = load_shared(from);
    if constexpr (!kMasked) return place.masked(pair);
    const void* ranks = __cvta_shared_to_generic(from_half_ + from / 2);
    return place.valid(pair, *static_cast<const uint16_t*>(ranks));
  }

  // Stores the thread's 16 channels of both pixels. Adds up their squares if norms are wanted.
  __device__ __forceinline__ void store(const PixelStrip& strip, const float (&acc)[32],
                                        SquareSum<Element>& squares) const {
    const bool relu = p_.activation == Activation::kRelu;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (first_channel_ + half * 32 >= p_.shape.out_channels) break;  // for all threads alike
      const int of_group = half * 32 + threadIdx.x % 4 * 8, channel = first_channel_ + of_group;
      float bias[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) bias[j] = bias_[of_group + j];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const bool exists = 8 * i < strip.left && channel < p_.shape.out_channels;
        const int64_t at = strip.output + 8 * i * pixel_output_ + channel;
        float values[8];
#pragma unroll
        for (int j = 0; j < 8; ++j)
          values[j] = acc[(half * 4 + j / 2) * 4 + 2 * i + j % 2] + bias[j];
        if (p_.residual != nullptr) add_residual(at, exists, values);
        if (!relu) {
          activate(p_.activation, values, [&](int j) { return slopes_[of_group + j]; });
        }
        uint32_t pairs[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          pairs[j] = finished_pair<Element>(values[2 * j], values[2 * j + 1], relu);
        }
        if (p_.norms != nullptr) {
#pragma unroll
          for (int j = 0; j < 4; ++j) add_squares<Element>(squares, exists ? pairs[j] : 0);
        }
        store_chunk(static_cast<Element*>(p_.output) + at, pairs, exists);
      }
    }
  }

  __device__ __forceinline__ void add_residual(int64_t at, bool exists, float (&values)[8]) const {
    const auto* from = static_cast<const Element*>(p_.residual) + at;
    const auto chunk = __builtin_bit_cast(Chunk<Element>, load_once(from, exists));
#pragma unroll
    for (int j = 0; j < 8; ++j) values[j] += widen(chunk.entry(j));
  }

  // Stores the output norm of the warp's pixel, over the images of a tile.
  __device__ void store_norm(const FewChannelsTile& tile, SquareSum<Element> squares) const {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      squares += __shfl_xor_sync(~0u, squares, distance);
    }
    const Extent& output = p_.shape.output;
    const int column = tile.column + column_of_warp();
    if (threadIdx.x % 32 != 0 || column >= output.columns) return;
    const int groups = (p_.shape.out_channels - 1) / 64 + 1;
    const int64_t line = static_cast<int64_t>(tile.image / kImageTile) * output.rows + tile.row;
    p_.norms[(line * output.columns + column) * groups + blockIdx.y] =
        static_cast<float>(sqrt(squares));
  }

  const FewChannelsParams& p_;
  OperandBlock* weights_;
  float *bias_, *slopes_;
  PairPlace* places_;  // of all steps
  uint16_t* patches_;
  PixelRanks* ranks_;
  uint32_t from_half_;  // from half the address of an entry to that of its rank
  int warpgroup_, parity_, first_channel_;
  int column_bytes_;      // from column to column in shared memory
  int pixel_bytes_;       // from pixel to pixel of a strip there
  int64_t pixel_output_;  // and in the output
  PairPlace of_steps_[kSteps][2];
};

template <class Element, int kSteps, bool kMasked>
__global__ void __launch_bounds__(kFewChannelsThreads, 2)
    conv_few_channels(const __grid_constant__ FewChannelsParams p) {
  extern __shared__ __align__(1024) uint8_t few_channels_shared[];
  let_next_kernel_start();
  FewChannels<Element, kSteps, kMasked> work(p, few_channels_shared);
  wait_for_previous_kernel();
  work.run();
}

template <class Element, int kSteps>
cudaError_t start_few_channels(const FewChannelsParams& p, int blocks, cudaStream_t stream) {
  const auto kernel = p.plan.masked ? conv_few_channels<Element, kSteps, true>
                                    : conv_few_channels<Element, kSteps, false>;
  const cudaError_t error =
      allow_shared_memory(reinterpret_cast<const void*>(kernel), kFewChannelsSharedBytes);
  if (error != cudaSuccess) return error;
  const dim3 grid(blocks, ceil_div(p.shape.out_channels, 64));
  return launch(kernel, grid, kFewChannelsThreads, few_channels_shared_bytes(p.plan),
                /*overlap_previous=*/true, stream, p);
}

// The caller sets all of `p` but what the launch sets.
template <class Element>
cudaError_t launch_few_channels(FewChannelsParams p, int multiprocessors, cudaStream_t stream) {
  const ConvShape& shape = p.shape;
  p.tiles = few_channels_tiles(shape, p.plan);
  p.by_column_tiles = Divisor(few_channels_column_tiles(shape, p.plan));
  p.by_row_tiles = Divisor(ceil_div(shape.output.rows, p.plan.rows));
  p.by_strips = Divisor(p.plan.strips);
  p.by_patch_rows = Divisor(p.plan.patch_rows);
  const int blocks = std::min(p.tiles, few_channels_grid(shape, p.plan, multiprocessors));
  cudaError_t error = cudaErrorInvalidValue;
  const auto start = [&]<int kSteps>(std::integral_constant<int, kSteps>) {
    if (kSteps == p.plan.steps) error = start_few_channels<Element, kSteps>(p, blocks, stream);
  };
  [&]<size_t... i>(std::index_sequence<i...>) {
    (start(std::integral_constant<int, kFewChannelsSteps[i]>()), ...);
  }
  (std::make_index_sequence<std::size(kFewChannelsSteps)>());
  return error;
}

}  // namespace spamm::kernels::conv::sm90
