// A depthwise convolution under a held threshold, for sm_80 and newer, in blocks of one pixel of
// several images. A thread block brings the area of the input that the windows of its tile cover
// into shared memory, one sector of channels for each pixel and image; takes the norms there, each
// once; and computes the tile, entry by entry. The images of a block share the tests.
#pragma once

#include "kernels/common/ptx_sm80.cuh"
#include "kernels/common/skip_test.cuh"
#include "kernels/conv/sm80/params.h"
#include "kernels/multiply/sm80/multiply.cuh"
#include "kernels/norm_map/chunk.cuh"

namespace spamm::kernels {

// The norm of one channel of images where the sum of squares is not safe, which is rare.
template <class Element>
__device__ __noinline__ NormOf<Element> scaled_norm_of_images(const Element* first, int images) {
  using Norm = NormOf<Element>;
  const auto entry = [&](int i) { return widen(first[i * (kSectorBytes / sizeof(Element))]); };
  typename Bits<Norm>::Type largest = 0;
  for (int i = 0; i < images; ++i) largest = max(largest, Bits<Norm>::of_magnitude(entry(i)));
  const ScaledNorm<Norm> scaled(Bits<Norm>::to(largest));
  Norm sum = 0;
  for (int i = 0; i < images && scaled.is_number(); ++i) sum = scaled.add(sum, entry(i));
  return scaled.norm(sum);
}

// A thread computes kImages images at a time, kApart images apart: if that is 4, neighbouring
// threads read neighbouring sectors. If kImages is 1, blocks have a single image.
template <class Element, int kImages, int kApart>
__global__ void __launch_bounds__(kDepthwiseThreads, 4)
    depthwise(const __grid_constant__ DepthwiseParams<NormOf<Element>> p) {
  using Norm = NormOf<Element>;
  constexpr int kBytes = sizeof(Element), kWidth = kBytes == 8 ? 1 : 2;
  constexpr int kChannels = kSectorBytes / kBytes, kLanes = kChannels / kWidth;
  constexpr int kTapsBytes = 2 * depthwise_norm_bytes(kBytes), kChunks = kSectorBytes / 16;
  constexpr int kNormBytes = kImages == 1 ? 0 : depthwise_norm_bytes(kBytes);
  using Entries = Neighbours<Element, kWidth>;
  using Norms = Neighbours<Norm, kWidth>;
  using Taps = Neighbours<Norm, 2 * kWidth>;  // weights, then their norms
  extern __shared__ __align__(128) char shared[];
  auto* const taps = reinterpret_cast<Taps*>(shared);
  const ConvSm80Params<Norm>& conv = p.conv;
  const Im2colMatrix& m = conv.pixels;
  char* const area = shared + m.positions * kTapsBytes;

  int number, sector;
  Size2 first;  // output pixel
  p.by_sectors(number, sector, blockIdx.x);
  p.by_tiles(first.rows, first.columns, number);
  first = {first.rows * p.tile.rows, first.columns * p.tile.columns};
  const int first_channel = sector * kChannels, first_image = blockIdx.y << m.log2_images;
  const int images = m.images_of(blockIdx.y), pixels = p.area.rows * p.area.columns;

  // Copies the area. What lies in the padding, or is no channel, becomes zeros.
  const int chunk = threadIdx.x % kChunks, place = threadIdx.x / kChunks;
  if (const int image = place & ((1 << p.log2_images) - 1); image < images) {
    const int number_of_chunk = sector * kChunks + chunk, pixel_chunks = m.channels * kBytes / 16;
    const auto* const from = static_cast<const uint4*>(m.data) + number_of_chunk;
    const int first_pixel = (first_image + image) * m.input.rows * m.input.columns;
    char* const to = area + kNormBytes + image * kSectorBytes + chunk * 16;
    const int step = kDepthwiseThreads / kChunks >> p.log2_images;
    for (int pixel = place >> p.log2_images; pixel < pixels; pixel += step) {
      int row, column;
      p.by_area(row, column, pixel);
      row += first.rows * m.stride.rows - m.padding.rows;
      column += first.columns * m.stride.columns - m.padding.columns;
      const bool exists = number_of_chunk < pixel_chunks &&
                          static_cast<unsigned>(row) < static_cast<unsigned>(m.input.rows) &&
                          static_cast<unsigned>(column) < static_cast<unsigned>(m.input.columns);
      const int64_t number = first_pixel + row * m.input.columns + column;
      copy_async(to + pixel * p.record, from + number * pixel_chunks, exists ? 16 : 0);
    }
  }
  commit_copies();
  for (int i = threadIdx.x; i < m.positions * kChannels; i += kDepthwiseThreads) {
    const int channel = min(first_channel + i % kChannels, p.channels - 1);
    const int64_t place = int64_t{channel} * m.positions + i / kChannels;
    const Norm weight = widen(static_cast<const Element*>(conv.weight.data)[place]);
    Norm* const to = taps[i / kWidth].entries + i % kWidth;
    to[0] = weight, to[kWidth] = conv.norm_weight ? conv.norm_weight[place] : abs(weight);
  }
  wait_copies<0>();
  __syncthreads();

  const Norm tau = conv.tau.value();
  const Norm scale =
      partial_block_scale(static_cast<Norm>(1 << m.log2_images), static_cast<Norm>(images));
  const int lane = threadIdx.x % kLanes, channel = first_channel + lane * kWidth;
  constexpr int kStep = kDepthwiseThreads / kLanes;
  for (int pixel = threadIdx.x / kLanes; kImages > 1 && pixel < pixels; pixel += kStep) {
    char* const record = area + pixel * p.record;
    const auto* const entries = reinterpret_cast<const Entries*>(record + kNormBytes) + lane;
    Norms norms{};
    bool nonzero = false;
#pragma unroll 8
    for (int i = 0; i < images; ++i) {
      const Entries line = entries[i * kLanes];
      for (int w = 0; w < kWidth; ++w) {
        const Norm x = widen(line.entries[w]);
        norms.entries[w] = fma(x, x, norms.entries[w]);
        nonzero |= !(x == 0);
      }
    }
    for (int w = 0; w < kWidth; ++w) {
      Norm norm = sqrt(norms.entries[w]);
      if (!std::is_same_v<Element, __half> && nonzero && !is_safe(norms.entries[w])) {
        norm = scaled_norm_of_images(entries->entries + w, images);
      }
      norms.entries[w] = norm_product(norm, scale);
    }
    reinterpret_cast<Norms*>(record)[lane] = norms;
  }
  if (kImages > 1) __syncthreads();

  if (channel >= p.channels) return;
  const int column_step = m.dilation.columns * p.record;
  // From behind a row of the window to the next.
  const int row_step = m.dilation.rows * p.area.columns * p.record - m.kernel_columns * column_step;
  const int items = p.tile.rows * p.tile.columns << p.log2_slots;
  for (int item = threadIdx.x / kLanes; item < items; item += kStep) {
    int row, column;
    p.by_tile(row, column, item >> p.log2_slots);
    const int slot = item & ((1 << p.log2_slots) - 1);
    const int image = slot % kApart + slot / kApart * kApart * kImages;
    const Size2 at = {first.rows + row, first.columns + column};
    if (at.rows >= m.output.rows || at.columns >= m.output.columns || image >= images) continue;
    const char* pixel =
        area + (row * m.stride.rows * p.area.columns + column * m.stride.columns) * p.record;
    const Taps* tap = taps + lane;
    Norm sums[kImages][kWidth] = {};
    for (int position = 0, left = m.kernel_columns; position < m.positions; ++position) {
      const Taps of = *tap;
      const char* const sector = pixel + kNormBytes + image * kSectorBytes;
      const auto* const entries = reinterpret_cast<const Entries*>(sector) + lane;
      const Norms norms = reinterpret_cast<const Norms*>(pixel)[kImages == 1 ? 0 : lane];
      Norm weights[kWidth];
      for (int w = 0; w < kWidth; ++w) {
        const Norm norm =
            kImages > 1 ? norms.entries[w] : norm_product(abs(widen(entries->entries[w])), scale);
        // Skipped blocks are finite, since their norms are: times 0 they change no sum. Nor do
        // blocks of zeros at tau = 0, which other kernels skip.
        weights[w] = is_valid(norm_product(of.entries[kWidth + w], norm), tau) ? of.entries[w] : 0;
      }
#pragma unroll
      for (int i = 0; i < kImages; ++i) {
        const Entries x = entries[i * kApart * kLanes];
        for (int w = 0; w < kWidth; ++w) {
          sums[i][w] = fma(weights[w], widen(x.entries[w]), sums[i][w]);
        }
      }
      tap += kLanes, pixel += column_step;
      if (--left == 0) left = m.kernel_columns, pixel += row_step;
    }
#pragma unroll
    for (int i = 0; i < kImages; ++i) {
      if (image + kApart * i >= images) continue;
      Entries result;
      for (int w = 0; w < kWidth; ++w) {
        Norm sum = sums[i][w];
        if (conv.bias) sum += widen(static_cast<const Element*>(conv.bias)[channel + w]);
        result.entries[w] = narrow<Element>(conv.relu && sum < 0 ? Norm{0} : sum);  // keeps NaN
      }
      const int64_t line = (first_image + image + kApart * i) * m.output.rows + at.rows;
      *reinterpret_cast<Entries*>(static_cast<Element*>(conv.output) + channel +
                                  (line * m.output.columns + at.columns) * p.channels) = result;
    }
  }
}

}  // namespace spamm::kernels
