// A convolution whose blocks are mostly empty, for sm_80 and newer, and the norms of its im2col
// blocks: groups of few channels (depthwise.cuh: of one), few input channels, or few images where a
// block holds 64. Tensor cores would multiply the zeros that fill a block. Here each thread
// computes a few pixels of one or several output channels, entry by entry.
//
// Neighbouring threads have neighbouring channels, so loads of channels-last memory, of weights and
// of norms lie side by side. The threads of a block have neighbouring pixels, whose windows share
// what they read in the L1 cache. Norms are (pixel blocks or pixels, kernel positions, groups,
// blocks of channels): to the classes of sm80/conv.cuh that is one matrix without groups.
#pragma once

#include "kernels/conv/sm80/conv.cuh"
#include "kernels/norm_map/chunk.cuh"

namespace spamm::kernels {

constexpr int kThinThreads = 256;

// The images of an output pixel that a thread computes in so many channels.
constexpr int thin_images(int out) { return out > 1 ? 4 : 8; }

// Three channels are loaded one by one.
template <class Element>
struct Neighbours<Element, 3> {
  Element entries[3];
};

// The entries that a pixel block has at a kernel position in one block of channels. kWidth channels
// are read at a time. kImages: the pixels are one of several images.
template <class Element, int kWidth, bool kImages>
class ThinBlock {
  using Norm = NormOf<Element>;
  using Entries = Neighbours<Element, kWidth>;

 public:
  // `depth_block` counts the blocks of channels of all groups.
  __device__ ThinBlock(const ThinParams<Norm>& p, int block, int kernel_position, int depth_block)
      : p_(p), origin_(p.conv.pixels, block), step_(p.conv.pixels, kernel_position) {
    const int group = depth_block / p.depth_blocks;
    const int channel = (depth_block - group * p.depth_blocks) << p.conv.log2_block_k;
    channels_ = kWidth == 3 ? 3 : min(p.channels - channel, 1 << p.conv.log2_block_k);
    first_ = static_cast<const Element*>(p.conv.pixels.data) + group * p.channels + channel;
  }

  // Adds all entries up by `add`(sum, entry). Sums of eight keep chains of roundings short, and as
  // many pixels are on their way together.
  template <class Add>
  __device__ Norm sum(const Add& add) const {
    constexpr int kRun = 8;
    const Im2colMatrix& m = p_.conv.pixels;
    const Im2colRow start = Im2colRow::at(m, origin_, 0);
    const bool reads = !kImages || step_.is_inside(m, start.row, start.column);
    const int count = !reads ? 0 : kImages ? min(p_.pixels, m.images - origin_.image) : p_.pixels;
    const int64_t image_entries = int64_t{m.input.rows} * m.input.columns * m.channels;
    const auto* image =
        first_ + static_cast<int64_t>(start.input_pixel + step_.pixels) * m.channels;
    Norm total = 0;
    for (int first = 0; first < p_.pixels; first += kRun) {
      const Element* from[kRun];
      bool exists[kRun];
#pragma unroll
      for (int i = 0; i < kRun; ++i) {
        from[i] = image, image += image_entries;
        exists[i] = first + i < count;
        if constexpr (!kImages) {
          const Im2colRow row = Im2colRow::at(m, origin_, first + i);
          from[i] = first_ + static_cast<int64_t>(row.input_pixel + step_.pixels) * m.channels;
          exists[i] = exists[i] && step_.is_inside(m, row.row, row.column);
        }
      }
      Norm line[kRun] = {}, part[kRun] = {}, run = 0;
      for (int c = 0; c < channels_; c += kWidth) {
        Entries entries[kRun] = {};
#pragma unroll
        for (int i = 0; i < kRun; ++i) {
          if (exists[i]) entries[i] = *reinterpret_cast<const Entries*>(from[i] + c);
        }
        const bool ends = (c + kWidth) % kRun == 0;
#pragma unroll
        for (int i = 0; i < kRun; ++i) {
#pragma unroll
          for (const Element x : entries[i].entries) part[i] = add(part[i], widen(x));
          if (ends) line[i] += part[i], part[i] = 0;
        }
      }
#pragma unroll
      for (int i = 0; i < kRun; ++i) run += line[i] + part[i];
      total += run;
    }
    return total;
  }

 private:
  const ThinParams<Norm>& p_;
  BlockOrigin origin_;
  WindowStep step_;
  const Element* first_;
  int channels_;
};

// The norm of a block whose sum of squares is not safe. It is rare, so it is not inlined.
template <class Block, class Norm>
__device__ __noinline__ Norm scaled_norm(const ThinParams<Norm>& p, int number, int kernel_position,
                                         int depth_block) {
  const Block block(p, number, kernel_position, depth_block);
  unsigned long long largest = 0;
  block.sum([&](Norm sum, Norm x) {
    largest = max(largest, static_cast<unsigned long long>(Bits<Norm>::of_magnitude(x)));
    return sum;
  });
  const ScaledNorm<Norm> scaled(Bits<Norm>::to(static_cast<typename Bits<Norm>::Type>(largest)));
  if (!scaled.is_number()) return scaled.norm(0);
  return scaled.norm(block.sum([&](Norm sum, Norm x) { return scaled.add(sum, x); }));
}

template <class Element, int kWidth, bool kImages>
__global__ void __launch_bounds__(kThinThreads, 2)
    thin_norms(const __grid_constant__ ThinParams<NormOf<Element>> p) {
  using Norm = NormOf<Element>;
  const Im2colMatrix& m = p.conv.pixels;
  const uint32_t number = blockIdx.x * kThinThreads + threadIdx.x;
  const uint32_t depth = p.groups * p.depth_blocks, line = number / depth;
  const uint32_t place = line / m.positions;
  if (place >= static_cast<uint32_t>(m.block_count())) return;
  using Block = ThinBlock<Element, kWidth, kImages>;
  const int position = line - place * m.positions, depth_block = number - line * depth;
  bool nonzero = false;
  const Norm squares = Block(p, place, position, depth_block).sum([&](Norm sum, Norm x) {
    nonzero |= !(x == 0);
    return fma(x, x, sum);
  });
  p.norms[number] = nonzero && !is_safe(squares)
                        ? scaled_norm<Block>(p, place, position, depth_block)
                        : sqrt(squares);
}

// Each thread computes kOut neighbouring output channels, of one group and one block, of one pixel
// of kImages images, which share a test. The threads of a block have `lanes` chunks of channels
// each, of neighbouring pixels. Thread blocks are numbered by pixels, channels and images.
template <class Element, int kWidth, int kOut, int kImages>
__global__ void __launch_bounds__(kThinThreads, 2)
    conv_thin(const __grid_constant__ ThinParams<NormOf<Element>> p, uint32_t lanes) {
  using Norm = NormOf<Element>;
  using Entries = Neighbours<Element, kWidth>;
  using Outputs = Neighbours<Element, kOut>;
  constexpr bool kOnce = kWidth == 3;  // a group has as many channels
  const ConvSm80Params<Norm>& conv = p.conv;
  const Im2colMatrix& m = conv.pixels;
  const int out_channels = p.groups * conv.out_channels;
  const uint32_t together = kThinThreads / lanes, of_block = threadIdx.x / lanes;
  const uint32_t place = blockIdx.x * together + of_block;
  const int channel = static_cast<int>(blockIdx.y * lanes + threadIdx.x % lanes) * kOut;
  if (channel >= out_channels || of_block >= together) return;
  const int group = channel / conv.out_channels, of_group = channel - group * conv.out_channels;
  const int depth_blocks = kOnce ? 1 : p.depth_blocks, depth = p.groups * depth_blocks;

  const uint32_t number = kImages > 1 ? place * p.pixels + blockIdx.z * kImages : place;
  const int number_of_block = static_cast<int>(number / p.pixels);
  const int index = static_cast<int>(number % p.pixels);
  const BlockOrigin block(m, number_of_block);
  const Im2colRow at = Im2colRow::at(m, block, index), first = Im2colRow::at(m, block, 0);
  if (at.output_pixel < 0) return;
  // Bytes from the first image. Of images that do not exist, the first one's entries are read.
  const int images = kImages > 1 ? min(kImages, m.images - block.image - index) : 1;
  int64_t of_image[kImages];
#pragma unroll
  for (int i = 0; i < kImages; ++i) {
    const int64_t entries = int64_t{i} * m.input.rows * m.input.columns * m.channels;
    of_image[i] = i < images ? entries * sizeof(Element) : 0;
  }

  const Norm tau = conv.tau.value();
  const int existing = min(1 << m.log2_images, m.images - block.image) *
                       min(1 << m.log2_rows, m.output.rows - block.row) *
                       min(1 << m.log2_columns, m.output.columns - block.column);
  const Norm scale =
      partial_block_scale(static_cast<Norm>(1 << m.log2_block()), static_cast<Norm>(existing));
  const bool per_pixel = conv.norm_pixels.per_pixel;
  const int line = (block.image >> m.log2_images) * m.input.rows + first.row;
  const int first_norm =
      per_pixel ? line * m.input.columns + first.column : number_of_block * m.positions;
  const Norm* const norms = conv.norm_pixels.norms + group * depth_blocks;
  const int weight_blocks = ((conv.out_channels - 1) >> conv.log2_block_m) + 1;
  const Norm* norm_weight =
      conv.norm_weight +
      (group * weight_blocks + (of_group >> conv.log2_block_m)) * m.positions * depth_blocks;
  const auto* weight = static_cast<const Element*>(conv.weight.data) + channel;
  const auto* const input = static_cast<const Element*>(m.data) + group * p.channels;
  Norm sums[kImages][kOut] = {};

  int row = 0, column = 0, next_row = m.kernel_columns;
  for (int position = 0; position < m.positions; ++position) {
    const bool inside =
        static_cast<unsigned>(at.row + row) < static_cast<unsigned>(m.input.rows) &&
        static_cast<unsigned>(at.column + column) < static_cast<unsigned>(m.input.columns);
    const int pixels = row * m.input.columns + column;
    const Element* const from = input + static_cast<int64_t>(at.input_pixel + pixels) * m.channels;
    const Norm* const norm =
        norms + static_cast<int64_t>(first_norm + (per_pixel ? pixels : position)) * depth;
    Entries entries[kImages];
    Outputs weights[kWidth];
    const auto load = [&](int c) {
#pragma unroll
      for (int i = 0; i < kImages; ++i) {
        const char* const address = reinterpret_cast<const char*>(from + c) + of_image[i];
        entries[i] = {};
        if (inside) entries[i] = *reinterpret_cast<const Entries*>(address);
      }
#pragma unroll
      for (int w = 0; w < kWidth; ++w) {
        const int64_t place = static_cast<int64_t>(c + w) * out_channels;
        weights[w] = *reinterpret_cast<const Outputs*>(weight + place);
      }
    };
    if constexpr (kOnce) load(0);  // on its way while norms are tested
    for (int d = 0; d < depth_blocks; ++d) {
      // 0 if the whole block lies in the padding.
      const Norm skip_norm = !per_pixel || inside ? norm_product(norm[d], scale) : Norm{0};
      if (!is_valid_im2col(*norm_weight++, skip_norm, tau)) continue;
      const int begin = d << conv.log2_block_k;
      const int end = kOnce ? kWidth : min(p.channels, begin + (1 << conv.log2_block_k));
      for (int c = begin; c < end; c += kWidth) {
        if constexpr (!kOnce) load(c);
#pragma unroll
        for (int w = 0; w < kWidth; ++w) {
#pragma unroll
          for (int i = 0; i < kImages; ++i) {
            const Norm entry = widen(entries[i].entries[w]);
#pragma unroll
            for (int o = 0; o < kOut; ++o) {
              sums[i][o] = fma(widen(weights[w].entries[o]), entry, sums[i][o]);
            }
          }
        }
      }
    }
    weight += static_cast<int64_t>(p.channels) * out_channels;
    column += m.dilation.columns;
    if (--next_row == 0) row += m.dilation.rows, column = 0, next_row = m.kernel_columns;
  }

#pragma unroll
  for (int i = 0; i < kImages; ++i) {
    if (i >= images) continue;
    Outputs result;
#pragma unroll
    for (int o = 0; o < kOut; ++o) {
      Norm sum = sums[i][o];
      if (conv.bias) sum += widen(static_cast<const Element*>(conv.bias)[channel + o]);
      result.entries[o] = narrow<Element>(conv.relu && sum < 0 ? Norm{0} : sum);  // keeps NaN
    }
    const int64_t pixel = at.output_pixel + int64_t{i} * m.output.rows * m.output.columns;
    *reinterpret_cast<Outputs*>(static_cast<Element*>(conv.output) + pixel * out_channels +
                                channel) = result;
  }
}

}  // namespace spamm::kernels
