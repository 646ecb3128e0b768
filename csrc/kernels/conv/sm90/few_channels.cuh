// The convolution of few input channels, such as a network's first layer. Half types, float32 sums,
// nothing skipped. It writes more than it reads, so each thread writes 16 bytes at a time, and the
// output norms are computed on the way.
//
// A thread block computes 64 output channels of 8 neighbouring pixels for 64 images, from a copy of
// their windows in shared memory. A warp has one pixel: in its products images are rows and output
// channels are columns, permuted so that a thread gets 8 neighbouring channels of an image. K runs
// along a kernel row (kernel column, channel), 16 entries at a time. Same bits every time.
#pragma once

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
        pixels_(reinterpret_cast<uint16_t*>(shared) + layout_.weights) {
    const Extent& output = p.shape.output;
    const int strips = (output.columns - 1) / kFewChannelsColumns + 1;
    const int line = blockIdx.x / strips;
    first_column_ = (blockIdx.x - line * strips) * kFewChannelsColumns;
    image_block_ = line / output.rows;
    row_ = line - image_block_ * output.rows;
    first_image_ = image_block_ * kFewChannelsImages;
    images_ = min(output.images - first_image_, kFewChannelsImages);
    first_channel_ = blockIdx.y * 64;
  }

  // Copies weights and pixels into shared memory. The caller synchronises.
  __device__ void stage() {
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
    stage_pixels();
  }

  // Computes and stores the warp's pixel.
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
    for (int first = 0; first < images_; first += 32) {
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
    const int64_t line = static_cast<int64_t>(image_block_) * output.rows + row_;
    p_.norms[(line * output.columns + column) * groups + blockIdx.y] =
        static_cast<float>(sqrt(squares));
  }

 private:
  // The first of the thread's 8 output channels in the lower (0) or upper (1) 32 of 64.
  __device__ int channel(int half) const {
    return first_channel_ + half * 32 + threadIdx.x % 4 * 8;
  }

  // Each warp copies every eighth image, with loads of three kernel rows of four images in flight.
  __device__ void stage_pixels() {
    constexpr int kWarps = kFewChannelsThreads / 32, kImages = 4, kRows = 3;
    const ConvShape& shape = p_.shape;
    const int first =
        (first_column_ * shape.stride.columns - shape.padding.columns) * shape.channels;
    const int length = shape.input.columns * shape.channels;
    const int64_t image_size = static_cast<int64_t>(shape.input.rows) * length;
    const auto* input = static_cast<const uint16_t*>(p_.input) + first_image_ * image_size + first;
#pragma unroll 1
    for (int image = threadIdx.x / 32; image < kFewChannelsImages; image += kImages * kWarps) {
#pragma unroll 1
      for (int first_y = 0; first_y < shape.kernel.rows; first_y += kRows) {
#pragma unroll 1
        for (int x = threadIdx.x % 32; x < layout_.line; x += 32) {
          uint16_t entries[kRows][kImages];
#pragma unroll
          for (int y = 0; y < kRows; ++y) {
            const int row =
                row_ * shape.stride.rows - shape.padding.rows + (first_y + y) * shape.dilation.rows;
            const bool exists = first_y + y < shape.kernel.rows &&
                                static_cast<unsigned>(row) < shape.input.rows &&
                                static_cast<unsigned>(first + x) < length;
            const auto* from = input + image * image_size + static_cast<int64_t>(row) * length + x;
#pragma unroll
            for (int i = 0; i < kImages; ++i, from += kWarps * image_size) {
              entries[y][i] = 0;
              if (exists && image + i * kWarps < images_) entries[y][i] = *from;
            }
          }
          auto* to = pixels_ + image * layout_.image + first_y * layout_.line + x;
#pragma unroll
          for (int y = 0; y < kRows; ++y) {
            if (first_y + y >= shape.kernel.rows) continue;
#pragma unroll
            for (int i = 0; i < kImages; ++i) {
              to[i * kWarps * layout_.image + y * layout_.line] = entries[y][i];
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

  // acc += the weights times the warp's pixel in images `first` to `first` + 31.
  __device__ void multiply(int warp, int first, float (&acc)[2][8][4]) const {
    const ConvShape& shape = p_.shape;
    const int lane = threadIdx.x % 32;
    const uint16_t* pixel = pixels_ + (first + lane / 4) * layout_.image +
                            warp * shape.stride.columns * shape.channels + lane % 4 * 2;
    const uint2* weights = weights_ + lane;
    for (int y = 0; y < shape.kernel.rows; ++y, pixel += layout_.line) {
      for (int k = 0; k < layout_.chunks * 16; k += 16, weights += 256) {
        const int left = layout_.window - k - lane % 4 * 2;
        uint32_t a[2][4];
#pragma unroll
        for (int i = 0; i < 8; ++i) {  // bits of i: 16 images, 8 of K, 8 images
          const uint16_t* from = pixel + k + (i / 4 * 2 + i % 2) * 8 * layout_.image;
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

  // Stores the thread's 16 channels of an image and adds their squares.
  __device__ void store(int column, int image, const float (&acc)[8][4], int i,
                        const uint4 (&bias)[2], SquareSum<Element>& squares) const {
    if (image >= images_) return;
    const Extent& output = p_.shape.output;
    const int64_t line = (static_cast<int64_t>(first_image_) + image) * output.rows + row_;
    auto* pixel =
        static_cast<Element*>(p_.output) + (line * output.columns + column) * p_.shape.out_channels;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (channel(half) >= p_.shape.out_channels) continue;
      const auto biases = __builtin_bit_cast(Chunk<Element>, bias[half]);
      uint32_t pairs[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float low = acc[half * 4 + j][2 * i] + widen(biases.entry(2 * j));
        const float high = acc[half * 4 + j][2 * i + 1] + widen(biases.entry(2 * j + 1));
        pairs[j] = finished_pair<Element>(low, high, p_.relu);
        add_squares<Element>(squares, pairs[j]);
      }
      *reinterpret_cast<uint4*>(pixel + channel(half)) = {pairs[0], pairs[1], pairs[2], pairs[3]};
    }
  }

  const FewChannelsParams& p_;
  FewChannelsLayout layout_;
  uint2* weights_;
  uint16_t* pixels_;
  int first_column_, row_, image_block_, first_image_, images_, first_channel_;
};

template <class Element>
__global__ void __launch_bounds__(kFewChannelsThreads, 2)
    conv_few_channels(const __grid_constant__ FewChannelsParams p) {
  extern __shared__ __align__(16) uint8_t few_channels_shared[];
  let_next_kernel_start();
  FewChannels<Element> work(p, few_channels_shared);
  wait_for_previous_kernel();
  work.stage();
  __syncthreads();
  work.run();
}

template <class Element>
cudaError_t launch_few_channels(const FewChannelsParams& p, cudaStream_t stream) {
  const auto kernel = conv_few_channels<Element>;
  const Extent& output = p.shape.output;
  const int shared_bytes = FewChannelsLayout(p.shape).entries() * sizeof(Element);
  const dim3 grid(ceil_div(output.images, kFewChannelsImages) * output.rows *
                      ceil_div(output.columns, kFewChannelsColumns),
                  ceil_div(p.shape.out_channels, 64));
  // The same value for every shape, because other host threads may launch the kernel meanwhile.
  const cudaError_t error = cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kFewChannelsSharedBytes);
  if (error != cudaSuccess) return error;
  return launch(kernel, grid, kFewChannelsThreads, shared_bytes, /*overlap_previous=*/true, stream,
                p);
}

}  // namespace spamm::kernels::conv::sm90
