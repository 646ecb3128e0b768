// A convolution whose blocks are mostly empty, for sm_80 and newer, and the norms of its im2col
// blocks: groups of few channels, such as depthwise ones, few input channels, or few images where a
// block holds 64. Tensor cores would multiply the zeros that fill a block. Here each thread
// computes a few pixels of one output channel, entry by entry.
//
// Neighbouring threads have neighbouring channels, so loads of channels-last memory, of weights and
// of norms lie side by side. Norms are (pixel blocks or pixels, kernel positions, groups, blocks of
// channels): to the classes of sm80/conv.cuh that is one matrix without groups.
#pragma once

#include "kernels/conv/sm80/conv.cuh"
#include "kernels/norm_map/chunk.cuh"

namespace spamm::kernels {

constexpr int kThinThreads = 256;
constexpr int kThinPixels = 4;  // of a thread

// The entries that a pixel block has at a kernel position in one block of channels. kWidth channels
// are read at a time. kOnce: a group has as many.
template <class Element, int kWidth, bool kOnce>
class ThinBlock {
  using Norm = NormOf<Element>;

 public:
  // `depth_block` counts the blocks of channels of all groups.
  __device__ ThinBlock(const ThinParams<Norm>& p, int block, int kernel_position, int depth_block)
      : p_(p), origin_(p.conv.pixels, block), step_(p.conv.pixels, kernel_position) {
    const int group = depth_block / p.depth_blocks;
    const int channel = (depth_block - group * p.depth_blocks) << p.conv.log2_block_k;
    channels_ = min(p.channels - channel, 1 << p.conv.log2_block_k);
    first_ = static_cast<const Element*>(p.conv.pixels.data) + group * p.channels + channel;
  }

  // Adds all entries up by `add`(sum, entry). Sums of eight keep chains of roundings short.
  template <class Add>
  __device__ Norm sum(const Add& add) const {
    constexpr int kRun = 8;
    const Im2colMatrix& m = p_.conv.pixels;
    Norm total = 0;
    for (int first = 0; first < p_.pixels; first += kRun) {
      Norm run = 0;
#pragma unroll 4
      for (int i = 0; i < kRun; ++i) {
        const Im2colRow row = Im2colRow::at(m, origin_, first + i);
        const bool exists = first + i < p_.pixels && step_.is_inside(m, row.row, row.column);
        const Element* const from =
            first_ + static_cast<int64_t>(row.input_pixel + step_.pixels) * m.channels;
        const int channels = kOnce ? kWidth : exists ? channels_ : 0;
        Norm line = 0, part = 0;
        for (int c = 0; c < channels; c += kWidth) {
          Neighbours<Element, kWidth> entries{};
          if (exists) entries = *reinterpret_cast<const Neighbours<Element, kWidth>*>(from + c);
#pragma unroll
          for (int w = 0; w < kWidth; ++w) part = add(part, widen(entries.entries[w]));
          if ((c + kWidth) % kRun == 0) line += part, part = 0;
        }
        run += line + part;
      }
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
template <class Element, int kWidth, bool kOnce>
__device__ __noinline__ NormOf<Element> scaled_norm(
    const ThinBlock<Element, kWidth, kOnce>& block) {
  using Norm = NormOf<Element>;
  unsigned long long largest = 0;
  block.sum([&](Norm sum, Norm x) {
    largest = max(largest, magnitude_bits(x));
    return sum;
  });
  const ScaledNorm<Norm> scaled(from_magnitude_bits<Norm>(largest));
  if (!scaled.is_number()) return scaled.norm(0);
  return scaled.norm(block.sum([&](Norm sum, Norm x) { return scaled.add(sum, x); }));
}

template <class Element, int kWidth, bool kOnce>
__global__ void __launch_bounds__(kThinThreads, 3)
    thin_norms(const __grid_constant__ ThinParams<NormOf<Element>> p) {
  using Norm = NormOf<Element>;
  const Im2colMatrix& m = p.conv.pixels;
  const uint32_t number = blockIdx.x * kThinThreads + threadIdx.x;
  const uint32_t depth = p.groups * p.depth_blocks, line = number / depth;
  const uint32_t place = line / m.positions;
  if (place >= static_cast<uint32_t>(m.block_count())) return;
  const ThinBlock<Element, kWidth, kOnce> block(p, place, line - place * m.positions,
                                                number - line * depth);
  bool nonzero = false;
  const Norm squares = block.sum([&](Norm sum, Norm x) {
    nonzero |= !(x == 0);
    return fma(x, x, sum);
  });
  p.norms[number] = nonzero && !is_safe(squares) ? scaled_norm(block) : sqrt(squares);
}

// An output pixel of a thread: where its window begins, and its block's skip norms.
struct ThinPixel {
  int row, column, input_pixel, output_pixel;  // as Im2colRow
  int norms;                                   // of its block: those of the first kernel position
};

// Each thread computes kOut neighbouring output channels, of one group and one block. kOnce: a
// group has kWidth channels.
template <class Element, int kWidth, bool kOnce, int kOut>
__global__ void __launch_bounds__(kThinThreads, 2)
    conv_thin(const __grid_constant__ ThinParams<NormOf<Element>> p) {
  using Norm = NormOf<Element>;
  const ConvSm80Params<Norm>& conv = p.conv;
  const Im2colMatrix& m = conv.pixels;
  const uint32_t out_channels = p.groups * conv.out_channels;
  const uint32_t number = blockIdx.x * kThinThreads + threadIdx.x;
  const uint32_t place = number / (out_channels / kOut);
  const int channel = (number - place * (out_channels / kOut)) * kOut;
  const int group = channel / conv.out_channels, of_group = channel - group * conv.out_channels;
  const int depth_blocks = kOnce ? 1 : p.depth_blocks, depth = p.groups * depth_blocks;

  ThinPixel pixels[kThinPixels];
  Norm scales[kThinPixels];
#pragma unroll
  for (int i = 0; i < kThinPixels; ++i) {
    const uint32_t pixel = place * kThinPixels + i;
    const uint32_t number_of_block = pixel / p.pixels;
    const BlockOrigin block(m, number_of_block);
    const Im2colRow row = Im2colRow::at(m, block, pixel - number_of_block * p.pixels);
    const Im2colRow first = Im2colRow::at(m, block, 0);
    const int of_pixel =
        ((block.image >> m.log2_images) * m.input.rows + first.row) * m.input.columns +
        first.column;
    const int place_of_norms =
        conv.norm_pixels.per_pixel ? of_pixel : static_cast<int>(number_of_block) * m.positions;
    pixels[i] = {row.row, row.column, row.input_pixel, row.output_pixel, place_of_norms};
    scales[i] = partial_block_scale(
        static_cast<Norm>(1 << m.log2_block()),
        static_cast<Norm>(max(1, min(1 << m.log2_images, m.images - block.image) *
                                     min(1 << m.log2_rows, m.output.rows - block.row) *
                                     min(1 << m.log2_columns, m.output.columns - block.column))));
  }

  // The first pixel of a block exists if any does.
  const bool share_block = p.pixels % kThinPixels == 0;
  uint32_t existing = 0;
#pragma unroll
  for (int i = 0; i < kThinPixels; ++i) {
    existing |= static_cast<uint32_t>(pixels[i].output_pixel >= 0) << i;
  }
  const Norm tau = conv.tau.value();
  const int weight_blocks = ((conv.out_channels - 1) >> conv.log2_block_m) + 1;
  const Norm* norm_weight =
      conv.norm_weight +
      (group * weight_blocks + (of_group >> conv.log2_block_m)) * m.positions * depth_blocks;
  const auto* weight = static_cast<const Element*>(conv.weight.data) + channel;
  const auto* const input = static_cast<const Element*>(m.data) + group * p.channels;
  const Norm* const norms = conv.norm_pixels.norms + group * depth_blocks;
  Norm sums[kOut][kThinPixels] = {};

  int row = 0, column = 0, next_row = m.kernel_columns;
  for (int position = 0; position < m.positions; ++position) {
    const int steps_pixels = row * m.input.columns + column;
    const Element* from[kThinPixels];
    const Norm* norm[kThinPixels];
    uint32_t inside = 0;  // a bit for each pixel
#pragma unroll
    for (int i = 0; i < kThinPixels; ++i) {
      inside |= static_cast<uint32_t>(static_cast<unsigned>(pixels[i].row + row) <
                                          static_cast<unsigned>(m.input.rows) &&
                                      static_cast<unsigned>(pixels[i].column + column) <
                                          static_cast<unsigned>(m.input.columns))
                << i;
      from[i] = input + static_cast<int64_t>(pixels[i].input_pixel + steps_pixels) * m.channels;
      const int step = conv.norm_pixels.per_pixel ? steps_pixels : position;
      norm[i] = norms + static_cast<int64_t>(pixels[i].norms + step) * depth;
    }
    for (int d = 0; d < depth_blocks; ++d) {
      const Norm of_weight = *norm_weight++;
      const auto is_valid = [&](int i) {
        // 0 if the whole block lies in the padding.
        const bool reads = !conv.norm_pixels.per_pixel || (inside >> i & 1);
        const Norm skip_norm = reads ? norm_product(norm[i][d], scales[i]) : Norm{0};
        return is_valid_im2col(of_weight, skip_norm, tau);
      };
      uint32_t valid = 0;
      if (share_block) {
        if (existing != 0 && is_valid(0)) valid = existing;
      } else {
#pragma unroll
        for (int i = 0; i < kThinPixels; ++i) {
          if (existing >> i & 1) valid |= static_cast<uint32_t>(is_valid(i)) << i;
        }
      }
      const int begin = d << conv.log2_block_k;
      const int end = kOnce ? kWidth : min(p.channels, begin + (1 << conv.log2_block_k));
      if (valid == 0) continue;
      for (int c = begin; c < end; c += kWidth) {
        Neighbours<Element, kWidth> entries[kThinPixels];
#pragma unroll
        for (int i = 0; i < kThinPixels; ++i) {
          entries[i] = {};
          if ((valid & inside) >> i & 1) {
            entries[i] = *reinterpret_cast<const Neighbours<Element, kWidth>*>(from[i] + c);
          }
        }
#pragma unroll
        for (int w = 0; w < kWidth; ++w) {
          const auto weights = *reinterpret_cast<const Neighbours<Element, kOut>*>(
              weight + static_cast<int64_t>(c + w) * out_channels);
#pragma unroll
          for (int i = 0; i < kThinPixels; ++i) {
            if ((valid >> i & 1) == 0) continue;
#pragma unroll
            for (int o = 0; o < kOut; ++o) {
              sums[o][i] = fma(widen(weights.entries[o]), widen(entries[i].entries[w]), sums[o][i]);
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
  for (int i = 0; i < kThinPixels; ++i) {
    if (pixels[i].output_pixel < 0) continue;
    Neighbours<Element, kOut> result;
#pragma unroll
    for (int o = 0; o < kOut; ++o) {
      Norm sum = sums[o][i];
      if (conv.bias) sum += widen(static_cast<const Element*>(conv.bias)[channel + o]);
      result.entries[o] = narrow<Element>(conv.relu && sum < 0 ? Norm{0} : sum);  // keeps NaN
    }
    *reinterpret_cast<Neighbours<Element, kOut>*>(
        static_cast<Element*>(conv.output) +
        static_cast<int64_t>(pixels[i].output_pixel) * out_channels + channel) = result;
  }
}

}  // namespace spamm::kernels
