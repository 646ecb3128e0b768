// A convolution of groups of one channel, or of few, under a held threshold, for sm_80 and newer,
// in blocks of one pixel of several images. A thread block brings the area of the input that the
// windows of its tile cover into shared memory, one sector of channels for each pixel and image;
// takes the norms there, each once; and computes the tile, entry by entry or on tensor cores. The
// images of a block share the tests.
#pragma once

#include "kernels/common/ptx_sm80.cuh"
#include "kernels/common/skip_test.cuh"
#include "kernels/conv/sm80/params.h"
#include "kernels/multiply/sm80/multiply.cuh"
#include "kernels/multiply/sm80/tensor_core_engine.cuh"
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

// The share of a thread block: output pixels from `first` on.
struct AreaPlace {
  int sector, first_image, images;
  Size2 first;

  template <class Norm>
  __device__ explicit AreaPlace(const DepthwiseParams<Norm>& p)
      : first_image(blockIdx.y << p.conv.pixels.log2_images),
        images(p.conv.pixels.images_of(blockIdx.y)) {
    int number;
    p.by_sectors(number, sector, blockIdx.x);
    p.by_tiles(first.rows, first.columns, number);
    first = {first.rows * p.tile.rows, first.columns * p.tile.columns};
  }
};

// Starts the copy of the area. What lies in the padding, or is no channel, becomes zeros. `to`: the
// entries of its first pixel.
template <int kBytes, class Norm>
__device__ __forceinline__ void copy_area(const DepthwiseParams<Norm>& p, const AreaPlace& at,
                                          char* to) {
  constexpr int kChunks = kSectorBytes / 16;
  const Im2colMatrix& m = p.conv.pixels;
  const int chunk = threadIdx.x % kChunks, place = threadIdx.x / kChunks;
  const int image = place & ((1 << p.log2_images) - 1), pixels = p.area.rows * p.area.columns;
  if (image < at.images) {
    const int number_of_chunk = at.sector * kChunks + chunk,
              pixel_chunks = m.channels * kBytes / 16;
    const auto* const from = static_cast<const uint4*>(m.data) + number_of_chunk;
    const int first_pixel = (at.first_image + image) * m.input.rows * m.input.columns;
    to += image * kSectorBytes + chunk * 16;
    const int step = kDepthwiseThreads / kChunks >> p.log2_images;
    for (int pixel = place >> p.log2_images; pixel < pixels; pixel += step) {
      int row, column;
      p.by_area(row, column, pixel);
      row += at.first.rows * m.stride.rows - m.padding.rows;
      column += at.first.columns * m.stride.columns - m.padding.columns;
      const bool exists = number_of_chunk < pixel_chunks &&
                          static_cast<unsigned>(row) < static_cast<unsigned>(m.input.rows) &&
                          static_cast<unsigned>(column) < static_cast<unsigned>(m.input.columns);
      const int64_t number = first_pixel + row * m.input.columns + column;
      copy_async(to + pixel * p.record, from + number * pixel_chunks, exists ? 16 : 0);
    }
  }
  commit_copies();
}

// A thread computes kImages images at a time, kApart images apart: if that is 4, neighbouring
// threads read neighbouring sectors. If kImages is 1, blocks have a single image.
template <class Element, int kImages, int kApart>
__global__ void __launch_bounds__(kDepthwiseThreads, 4)
    depthwise(const __grid_constant__ DepthwiseParams<NormOf<Element>> p) {
  using Norm = NormOf<Element>;
  constexpr int kBytes = sizeof(Element), kWidth = kBytes == 8 ? 1 : 2;
  constexpr int kChannels = kSectorBytes / kBytes, kLanes = kChannels / kWidth;
  constexpr int kTapsBytes = 2 * depthwise_norm_bytes(kBytes);
  constexpr int kNormBytes = kImages == 1 ? 0 : depthwise_norm_bytes(kBytes);
  using Entries = Neighbours<Element, kWidth>;
  using Norms = Neighbours<Norm, kWidth>;
  using Taps = Neighbours<Norm, 2 * kWidth>;  // weights, then their norms
  extern __shared__ __align__(128) char shared[];
  auto* const taps = reinterpret_cast<Taps*>(shared);
  const ConvSm80Params<Norm>& conv = p.conv;
  const Im2colMatrix& m = conv.pixels;
  char* const area = shared + m.positions * kTapsBytes;

  const AreaPlace place(p);
  const auto [sector, first_image, images, first] = place;
  const int first_channel = sector * kChannels, pixels = p.area.rows * p.area.columns;
  copy_area<kBytes>(p, place, area + kNormBytes);
  for (int i = threadIdx.x; i < m.positions * kChannels; i += kDepthwiseThreads) {
    const int channel = min(first_channel + i % kChannels, p.channels - 1);
    const int64_t number = int64_t{channel} * m.positions + i / kChannels;
    const Norm weight = widen(static_cast<const Element*>(conv.weight.data)[number]);
    Norm* const to = taps[i / kWidth].entries + i % kWidth;
    to[0] = weight, to[kWidth] = conv.norm_weight ? conv.norm_weight[number] : abs(weight);
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

// The same for groups of 4, 8 or 16 channels (kWidth) of a half type, and as many output channels.
// The rows of an instruction are 16 images or pixels; its K is a sector, whose weights are 0
// between groups. Where a sector has several groups, each is multiplied by itself, as zeros times
// infinity would reach the others. What is skipped counts as zero. kTiles: of 16 rows; two are of
// one pixel.
template <class Mma, int kWidth, int kTiles>
__global__ void __launch_bounds__(kDepthwiseThreads, 3)
    narrow_groups(const __grid_constant__ DepthwiseParams<float> p) {
  using Element = typename Mma::Element;
  constexpr int kChannels = kSectorBytes / 2, kNormBytes = depthwise_norm_bytes(2);
  constexpr int kGroups = kChannels / kWidth, kRows = 16 * kTiles;
  extern __shared__ __align__(128) char shared[];
  const ConvSm80Params<float>& conv = p.conv;
  const Im2colMatrix& m = conv.pixels;
  // For each position, the fragments of all lanes; and norms of the weight, of 4 groups at most.
  auto* const taps = reinterpret_cast<uint4*>(shared);
  auto* const tap_norms = reinterpret_cast<float*>(taps + m.positions * 32);
  char* const area = reinterpret_cast<char*>(tap_norms + m.positions * 4);
  const AreaPlace place(p);
  const auto [sector, first_image, images, first] = place;
  const int pixels = p.area.rows * p.area.columns;
  copy_area<2>(p, place, area + kNormBytes);

  // Register r of lane 4n + t is K 8 (r % 2) + 2t and the next of column 8 (r / 2) + n.
  const int lane = threadIdx.x % 32, t = lane % 4;
#pragma unroll 4
  for (int i = threadIdx.x; i < m.positions * 128; i += kDepthwiseThreads) {
    const int number = i % 4, k = 8 * (number % 2) + i / 4 % 4 * 2;
    const int n = 8 * (number / 2) + i / 16 % 8, channel = sector * kChannels + n;
    const bool exists = channel < p.channels && k / kWidth == n / kWidth;
    const auto* const weight = static_cast<const uint16_t*>(conv.weight.data) +
                               channel * p.weight_steps[0] + k % kWidth * p.weight_steps[1] +
                               i / 128 * p.weight_steps[2];
    reinterpret_cast<uint32_t*>(taps)[i] =
        load_two_bytes(weight, exists) | load_two_bytes(weight + p.weight_steps[1], exists) << 16;
  }
  for (int i = threadIdx.x; i < m.positions * 4; i += kDepthwiseThreads) {
    const int group = sector * kGroups + i % 4;
    const bool exists = i % 4 < kGroups && group < p.channels / kWidth;
    tap_norms[i] = exists ? conv.norm_weight[int64_t{group} * m.positions + i / 4] : 0;
  }
  wait_copies<0>();
  __syncthreads();

  // The norms of pixels: eight threads have two channels each.
  const float tau = conv.tau.value();
  const float scale =
      partial_block_scale(static_cast<float>(1 << m.log2_images), static_cast<float>(images));
  for (int pixel = threadIdx.x / 8; pixel < pixels; pixel += kDepthwiseThreads / 8) {
    char* const record = area + pixel * p.record;
    const auto* const entries = reinterpret_cast<const uint32_t*>(record + kNormBytes) + lane % 8;
    const unsigned sharing = 0xffu << (lane & 24);
    uint32_t any = 0;
    const auto sum_of_squares = [&](auto sum) {
#pragma unroll 8
      for (int i = 0; i < images; ++i) {
        const uint32_t pair = entries[i * 8];
        const decltype(sum) low = widen(__builtin_bit_cast(Element, static_cast<uint16_t>(pair)));
        const decltype(sum) high =
            widen(__builtin_bit_cast(Element, static_cast<uint16_t>(pair >> 16)));
        sum = fma(high, high, fma(low, low, sum));
        any |= pair & 0x7fff7fff;
      }
#pragma unroll
      for (int distance = 1; distance < kWidth / 2; distance *= 2) {
        sum += __shfl_xor_sync(sharing, sum, distance);
      }
      return sum;
    };
    float sum = sum_of_squares(0.0f), norm = sqrtf(sum);
    // Squares of bfloat16 may leave float's range.
    if (!std::is_same_v<Element, __half> && __any_sync(sharing, any != 0 && !is_safe(sum))) {
      norm = static_cast<float>(sqrt(sum_of_squares(0.0)));
    }
    if (lane % 8 * 2 % kWidth == 0) {
      reinterpret_cast<float*>(record)[lane % 8 * 2 / kWidth] = norm_product(norm, scale);
    }
  }
  __syncthreads();

  const int column_step = m.dilation.columns * p.record;
  const int row_step = m.dilation.rows * p.area.columns * p.record - m.kernel_columns * column_step;
  const int rows = p.tile.rows * p.tile.columns << p.log2_images;
  const int channel = sector * kChannels + 2 * t;  // the first of two, 8 before two others
  const int64_t image_step = int64_t{1} * m.output.rows * m.output.columns * p.channels;
  float bias[2][2] = {};
  for (int i = 0; conv.bias && i < 4; ++i) {
    const int of = min(channel + i / 2 * 8 + i % 2, p.channels - 1);
    bias[i / 2][i % 2] = widen(static_cast<const Element*>(conv.bias)[of]);
  }
  for (int from_row = threadIdx.x / 32 * kRows; from_row < rows;
       from_row += kDepthwiseThreads / 32 * kRows) {
    // The record of a row's pixel; its image and output, which may not exist.
    struct Line {
      const char* record;
      int image;
      Element* output;
    };
    const auto line_at = [&](int number) {
      int row, column;
      p.by_tile(row, column, min(number, rows - 1) >> p.log2_images);
      const int image = number & ((1 << p.log2_images) - 1);
      const char* const record =
          area + (row * m.stride.rows * p.area.columns + column * m.stride.columns) * p.record;
      row += first.rows, column += first.columns;
      const bool exists = number < rows && row < m.output.rows && column < m.output.columns;
      Element* const output = static_cast<Element*>(conv.output) +
                              (first_image + image) * image_step +
                              int64_t{row * m.output.columns + column} * p.channels + channel;
      return Line{record, image, exists ? output : nullptr};
    };
    const Line of_load = line_at(from_row + lane % 16);
    const Line lines[2] = {line_at(from_row + lane / 4), line_at(from_row + lane / 4 + 8)};
    const char* from = of_load.record + kNormBytes + of_load.image * kSectorBytes + lane / 16 * 16;
    const char* records[2] = {lines[0].record, lines[1].record};
    const auto group_of = [&](int half) { return (2 * t + 8 * half) / kWidth; };  // of a lane's K
    float acc[kTiles][4][4] = {};
    for (int position = 0, left = m.kernel_columns; position < m.positions; ++position) {
      bool valid[2][2], needed = false;  // row, half
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = kTiles == 1 ? i % 2 : 0, group = group_of(i / 2);
        const float norm = reinterpret_cast<const float*>(records[row])[group];
        valid[i % 2][i / 2] = is_valid(norm_product(tap_norms[position * 4 + group], norm), tau);
        needed |= valid[i % 2][i / 2];
      }
      if (__any_sync(~0u, needed)) {
        const uint4 b = taps[position * 32 + lane];
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
          uint32_t a[4];
          load_matrices(a, from + tile * 16 * kSectorBytes);
#pragma unroll
          for (int i = 0; i < 4; ++i) a[i] = valid[i % 2][i / 2] ? a[i] : 0;
#pragma unroll
          for (int part = 0; part < 4; part += kWidth == 4 ? 1 : 2) {  // of columns of one group
            uint32_t of_group[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              of_group[i] = group_of(i / 2) == part * 4 / kWidth ? a[i] : 0;
            }
            Mma::multiply(acc[tile][part], of_group, part < 2 ? b.x : b.z, part < 2 ? b.y : b.w);
          }
        }
      }
      int step = column_step;
      if (--left == 0) left = m.kernel_columns, step += row_step;
      from += step, records[0] += step, records[1] += step;
    }
#pragma unroll
    for (int i = 0; i < 4 * kTiles; ++i) {  // rows, then halves of the columns
      const int tile = i / 4, row = i / 2 % 2, half = i % 2;
      const Line& line = lines[row];
      if (!line.output || line.image + 16 * tile >= images || channel + 8 * half >= p.channels) {
        continue;
      }
      Neighbours<Element, 2> result;
#pragma unroll
      for (int w = 0; w < 2; ++w) {
        const auto& sums = acc[tile];
        const bool second = kWidth == 4 && t / 2 == 1;
        const float sum = bias[half][w] +
                          (second ? sums[2 * half + 1][2 * row + w] : sums[2 * half][2 * row + w]);
        result.entries[w] = narrow<Element>(conv.relu && sum < 0 ? 0.0f : sum);  // keeps NaN
      }
      *reinterpret_cast<Neighbours<Element, 2>*>(line.output + 16 * tile * image_step + 8 * half) =
          result;
    }
  }
}

}  // namespace spamm::kernels
