// The convolution of few input channels, such as a network's first layer. Half types, float32 sums,
// nothing skipped. It writes more than it reads, so each thread writes 16 bytes at a time, and the
// output norms are computed on the way.
//
// A thread block computes 64 output channels of 8 neighbouring columns of 64 lines, from a copy of
// their windows in shared memory. A line is an output row of an image: those of 64 images, or
// neighbouring rows of fewer. A warp has one column: in its products lines are rows and output
// channels are columns, permuted so that a thread gets 8 neighbouring channels of a line. K runs
// along a kernel row (kernel column, channel), 16 entries at a time. Same bits every time.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/common/launch.cuh"
#include "kernels/common/overlap.cuh"
#include "kernels/common/ptx_sm80.cuh"
#include "kernels/conv/sm90/epilogue.cuh"
#include "kernels/conv/sm90/few_channels_params.h"
#include "kernels/conv/sm90/norms.cuh"

namespace spamm::kernels::conv::sm90 {

// The output channel (0 to 63) of column `column` of product `product` (0 to 7).
__device__ inline int channel_of_column(int product, int column) {
  return product / 4 * 32 + column / 2 * 8 + product % 4 * 2 + column % 2;
}

template <class Element>
__device__ __forceinline__ void multiply_16x8(float (&d)[4], const uint32_t (&a)[4], uint2 b) {
  if constexpr (std::is_same_v<Element, __half>) {
    mma_f16(d, a[0], a[1], a[2], a[3], b.x, b.y);
  } else {
    mma_bf16(d, a[0], a[1], a[2], a[3], b.x, b.y);
  }
}

// Adds the squares of two stored values.
template <class Element>
__device__ __forceinline__ void add_squares(SquareSum<Element>& sum, uint32_t pair) {
  const SquareSum<Element> low = widen(__builtin_bit_cast(Element, static_cast<uint16_t>(pair)));
  const SquareSum<Element> high =
      widen(__builtin_bit_cast(Element, static_cast<uint16_t>(pair >> 16)));
  sum = fma(high, high, fma(low, low, sum));
}

template <class Element>
class FewChannels {
 public:
  __device__ FewChannels(const FewChannelsParams& p, uint8_t* shared)
      : p_(p),
        layout_(p.shape),
        weights_(reinterpret_cast<uint2*>(shared)),
        pixels_(reinterpret_cast<uint16_t*>(shared) + layout_.weights),
        first_channel_(blockIdx.y * 64) {}

  // Copies the weights into shared memory. They serve all tiles. The caller synchronises.
  __device__ void stage_weights() {
    // Three at a time: all loads of a 3 x 3 kernel are then in flight together.
    constexpr int kUnroll = 3;
    const int count = layout_.weights / 4;
    for (int first = threadIdx.x; first < count; first += kUnroll * kFewChannelsThreads) {
      uint2 entries[kUnroll];
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        entries[i] = weights_of(min(first + i * kFewChannelsThreads, count - 1));
      }
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        if (first + i * kFewChannelsThreads < count) {
          weights_[first + i * kFewChannelsThreads] = entries[i];
        }
      }
    }
  }

  // Copies the pixels of a tile into shared memory. The caller synchronises.
  __device__ void stage_pixels(int tile) {
    const int strips = (p_.shape.output.columns - 1) / kFewChannelsColumns + 1;
    const int lines = tile / strips;
    first_column_ = (tile - lines * strips) * kFewChannelsColumns;
    const int rows = kFewChannelsLines >> p_.log2_images;
    const int row_blocks = (p_.shape.output.rows - 1) / rows + 1;
    image_block_ = lines / row_blocks;
    first_row_ = (lines - image_block_ * row_blocks) * rows;
    const int entry =
        (first_column_ * p_.shape.stride.columns - p_.shape.padding.columns) * p_.shape.channels;
    skew_ = p_.rows_are_aligned ? entry & 7 : 0;
    first_entry_ = entry - skew_;
    p_.rows_are_aligned ? stage_chunks() : stage_entries();
  }

  // Computes and stores the warp's column of the tile.
  __device__ void run() const {
    const int warp = threadIdx.x / 32;
    const int column = first_column_ + warp;
    if (column >= p_.shape.output.columns) return;
    uint4 bias[2] = {};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (p_.bias == nullptr || channel(half) >= p_.shape.out_channels) continue;
      bias[half] =
          *reinterpret_cast<const uint4*>(static_cast<const Element*>(p_.bias) + channel(half));
    }
    SquareSum<Element> squares = 0;
    for (int first = 0; first < kFewChannelsLines; first += 32) {
      float acc[2][8][4] = {};
      multiply(warp, first, acc);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        store(column, first + i * 8 + threadIdx.x % 32 / 4, acc[i / 2], i % 2, bias, squares);
      }
    }
    if (p_.norms == nullptr) return;
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      squares += __shfl_xor_sync(~0u, squares, distance);
    }
    if (threadIdx.x % 32 != 0) return;
    const Extent& output = p_.shape.output;
    const int groups = (p_.shape.out_channels - 1) / 64 + 1;
    const int64_t line = static_cast<int64_t>(image_block_) * output.rows + first_row_;
    p_.norms[(line * output.columns + column) * groups + blockIdx.y] =
        static_cast<float>(sqrt(squares));
  }

 private:
  // The first of the thread's 8 output channels in the lower (0) or upper (1) 32 of 64.
  __device__ int channel(int half) const {
    return first_channel_ + half * 32 + threadIdx.x % 4 * 8;
  }

  __device__ int image_of(int line) const {
    return (image_block_ << p_.log2_images) + (line & ((1 << p_.log2_images) - 1));
  }
  __device__ int row_of(int line) const { return first_row_ + (line >> p_.log2_images); }

  // The entries of the input row that an output line meets at kernel row y; null for padding.
  __device__ const uint16_t* input_row(int line, int y) const {
    const ConvShape& shape = p_.shape;
    const int image = image_of(line);
    const int row = row_of(line) * shape.stride.rows - shape.padding.rows + y * shape.dilation.rows;
    if (image >= shape.input.images || static_cast<unsigned>(row) >= shape.input.rows) {
      return nullptr;
    }
    return static_cast<const uint16_t*>(p_.input) +
           (static_cast<int64_t>(image) * shape.input.rows + row) * shape.input.columns *
               shape.channels;
  }

  // Copies the pixels chunk by chunk, half a warp for each input row. A chunk lies inside of its
  // row or outside.
  __device__ void stage_chunks() {
    constexpr int kLanes = 16;
    const int length = p_.shape.input.columns * p_.shape.channels;
    const int rows = kFewChannelsLines * p_.shape.kernel.rows;
#pragma unroll 2
    for (int i = threadIdx.x / kLanes; i < rows; i += kFewChannelsThreads / kLanes) {
      const int y = i / kFewChannelsLines, line = i % kFewChannelsLines;
      const uint16_t* from = input_row(line, y);
      uint16_t* to = pixels_ + line * layout_.lines + y * layout_.line;
      for (int x = threadIdx.x % kLanes * 8; x < layout_.line; x += kLanes * 8) {
        const int at = first_entry_ + x;
        const bool exists = from != nullptr && static_cast<unsigned>(at) < length;
        copy_async(to + x, exists ? static_cast<const void*>(from + at) : p_.input,
                   exists ? 16 : 0);
      }
    }
    commit_copies();
    wait_copies<0>();
  }

  // Copies the pixels entry by entry. Each warp has every eighth line, with loads of three kernel
  // rows of four lines in flight.
  __device__ void stage_entries() {
    constexpr int kWarps = kFewChannelsThreads / 32, kTogether = 4, kRows = 3;
    const ConvShape& shape = p_.shape;
    const int length = shape.input.columns * shape.channels;
#pragma unroll 1
    for (int line = threadIdx.x / 32; line < kFewChannelsLines; line += kTogether * kWarps) {
#pragma unroll 1
      for (int first_y = 0; first_y < shape.kernel.rows; first_y += kRows) {
        const uint16_t* from[kRows][kTogether];
#pragma unroll
        for (int y = 0; y < kRows; ++y) {
#pragma unroll
          for (int i = 0; i < kTogether; ++i) {
            const bool exists = first_y + y < shape.kernel.rows;
            from[y][i] = exists ? input_row(line + i * kWarps, first_y + y) : nullptr;
          }
        }
#pragma unroll 1
        for (int x = threadIdx.x % 32; x < layout_.line; x += 32) {
          const int at = first_entry_ + x;
          uint16_t entries[kRows][kTogether];
#pragma unroll
          for (int y = 0; y < kRows; ++y) {
#pragma unroll
            for (int i = 0; i < kTogether; ++i) {
              const bool exists = from[y][i] != nullptr && static_cast<unsigned>(at) < length;
              entries[y][i] = exists ? from[y][i][at] : 0;
            }
          }
          auto* to = pixels_ + line * layout_.lines + first_y * layout_.line + x;
#pragma unroll
          for (int y = 0; y < kRows; ++y) {
            if (first_y + y >= shape.kernel.rows) continue;
#pragma unroll
            for (int i = 0; i < kTogether; ++i) {
              to[i * kWarps * layout_.lines + y * layout_.line] = entries[y][i];
            }
          }
        }
      }
    }
  }

  // The weights of lane i % 32 for product i / 32 % 8 in step i / 256, with zeros beyond the window
  // and beyond the output channels.
  __device__ uint2 weights_of(int i) const {
    const int lane = i % 32, product = i / 32 % 8, step = i / 256;
    const int row = step / layout_.chunks, first = (step - row * layout_.chunks) * 16;
    const int channel = first_channel_ + channel_of_column(product, lane / 4);
    const bool exists = channel < p_.shape.out_channels;
    const auto* line =
        static_cast<const uint16_t*>(p_.weight) +
        (static_cast<int64_t>(channel) * p_.shape.kernel.rows + row) * layout_.window;
    const auto entry = [&](int k) -> uint32_t {
      return exists && k < layout_.window ? line[k] : 0;
    };
    const auto pair = [&](int k) { return entry(k) | entry(k + 1) << 16; };
    const int k = first + lane % 4 * 2;
    return {pair(k), pair(k + 8)};
  }

  // acc += the weights times the warp's column of lines `first` to `first` + 31.
  __device__ void multiply(int warp, int first, float (&acc)[2][8][4]) const {
    const ConvShape& shape = p_.shape;
    const int lane = threadIdx.x % 32;
    const uint16_t* pixel = pixels_ + (first + lane / 4) * layout_.lines + skew_ +
                            warp * shape.stride.columns * shape.channels + lane % 4 * 2;
    const uint2* weights = weights_ + lane;
    for (int y = 0; y < shape.kernel.rows; ++y, pixel += layout_.line) {
      for (int k = 0; k < layout_.chunks * 16; k += 16, weights += 256) {
        const int left = layout_.window - k - lane % 4 * 2;
        uint32_t a[2][4];
#pragma unroll
        for (int i = 0; i < 8; ++i) {  // bits of i: 16 lines, 8 of K, 8 lines
          const uint16_t* from = pixel + k + (i / 4 * 2 + i % 2) * 8 * layout_.lines;
          const int at = i % 4 / 2 * 8;
          // Beyond the window lies another pixel, which may be infinite: it must not be multiplied.
          const uint32_t low = at < left ? from[at] : 0, high = at + 1 < left ? from[at + 1] : 0;
          a[i / 4][i % 4] = low | high << 16;
        }
#pragma unroll
        for (int product = 0; product < 8; ++product) {
          const uint2 b = weights[product * 32];
          multiply_16x8<Element>(acc[0][product], a[0], b);
          multiply_16x8<Element>(acc[1][product], a[1], b);
        }
      }
    }
  }

  // Stores the thread's 16 channels of a line and adds their squares.
  __device__ void store(int column, int line, const float (&acc)[8][4], int i,
                        const uint4 (&bias)[2], SquareSum<Element>& squares) const {
    const Extent& output = p_.shape.output;
    const int image = image_of(line), row = row_of(line);
    if (image >= output.images || row >= output.rows) return;
    auto* pixel = static_cast<Element*>(p_.output) +
                  ((static_cast<int64_t>(image) * output.rows + row) * output.columns + column) *
                      p_.shape.out_channels;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (channel(half) >= p_.shape.out_channels) continue;
      const auto biases = __builtin_bit_cast(Chunk<Element>, bias[half]);
      float values[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        values[j] = acc[half * 4 + j / 2][2 * i + j % 2] + widen(biases.entry(j));
      }
      const bool relu = p_.activation == Activation::kRelu;
      if (!relu) activate(p_.activation, values);
      uint32_t pairs[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        pairs[j] = finished_pair<Element>(values[2 * j], values[2 * j + 1], relu);
        add_squares<Element>(squares, pairs[j]);
      }
      *reinterpret_cast<uint4*>(pixel + channel(half)) = {pairs[0], pairs[1], pairs[2], pairs[3]};
    }
  }

  const FewChannelsParams& p_;
  FewChannelsLayout layout_;
  uint2* weights_;
  uint16_t* pixels_;
  int first_column_, first_row_, image_block_, first_channel_;
  int first_entry_;  // of a row, where the copy begins
  int skew_;         // entries of the copy before the first that is used
};

template <class Element>
__global__ void __launch_bounds__(kFewChannelsThreads, 2)
    conv_few_channels(const __grid_constant__ FewChannelsParams p) {
  extern __shared__ __align__(16) uint8_t few_channels_shared[];
  let_next_kernel_start();
  FewChannels<Element> work(p, few_channels_shared);
  wait_for_previous_kernel();
  work.stage_weights();
  for (int tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
    work.stage_pixels(tile);
    __syncthreads();
    work.run();
    __syncthreads();  // before the next tile's pixels
  }
}

template <class Element>
cudaError_t launch_few_channels(FewChannelsParams p, int multiprocessors, cudaStream_t stream) {
  const auto kernel = conv_few_channels<Element>;
  const Extent& output = p.shape.output;
  const int shared_bytes = FewChannelsLayout(p.shape).entries() * sizeof(Element);
  p.tiles = ceil_div(output.images, 1 << p.log2_images) *
            ceil_div(output.rows, kFewChannelsLines >> p.log2_images) *
            ceil_div(output.columns, kFewChannelsColumns);
  const int channel_blocks = ceil_div(p.shape.out_channels, 64);
  const dim3 grid(std::min(p.tiles, ceil_div(2 * multiprocessors, channel_blocks)), channel_blocks);
  // The same value for every shape, because other host threads may launch the kernel meanwhile.
  const cudaError_t error = cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kFewChannelsSharedBytes);
  if (error != cudaSuccess) return error;
  return launch(kernel, grid, kFewChannelsThreads, shared_bytes, /*overlap_previous=*/true, stream,
                p);
}

}  // namespace spamm::kernels::conv::sm90
