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
// are read at a time.
template <class Element, int kWidth>
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
        if (first + i >= p_.pixels || !step_.is_inside(m, row.row, row.column)) continue;
        const Element* const from =
            first_ + static_cast<int64_t>(row.input_pixel + step_.pixels) * m.channels;
        Norm line = 0, part = 0;
        for (int c = 0; c < channels_; c += kWidth) {
          const auto entries = *reinterpret_cast<const Neighbours<Element, kWidth>*>(from + c);
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
template <class Element, int kWidth>
__device__ __noinline__ NormOf<Element> scaled_norm(const ThinBlock<Element, kWidth>& block) {
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

template <class Element, int kWidth>
__global__ void __launch_bounds__(kThinThreads, 3)
    thin_norms(const __grid_constant__ ThinParams<NormOf<Element>> p) {
  using Norm = NormOf<Element>;
  const Im2colMatrix& m = p.conv.pixels;
  const uint32_t number = blockIdx.x * kThinThreads + threadIdx.x;
  const uint32_t depth = p.groups * p.depth_blocks, line = number / depth;
  const uint32_t place = line / m.positions;
  if (place >= static_cast<uint32_t>(m.block_count())) return;
  const ThinBlock<Element, kWidth> block(p, place, line - place * m.positions,
                                         number - line * depth);
  bool nonzero = false;
  const Norm squares = block.sum([&](Norm sum, Norm x) {
    nonzero |= !(x == 0);
    return fma(x, x, sum);
  });
  p.norms[number] = nonzero && !is_safe(squares) ? scaled_norm(block) : sqrt(squares);
}

// kOnce: a group has kWidth channels.
template <class Element, int kWidth, bool kOnce>
__global__ void __launch_bounds__(kThinThreads, 2)
    conv_thin(const __grid_constant__ ThinParams<NormOf<Element>> p) {
  using Norm = NormOf<Element>;
  using Line = Neighbours<Element, kWidth>;
  const ConvSm80Params<Norm>& conv = p.conv;
  const Im2colMatrix& m = conv.pixels;
  const uint32_t out_channels = p.groups * conv.out_channels;
  const uint32_t number = blockIdx.x * kThinThreads + threadIdx.x;
  const uint32_t place = number / out_channels, channel = number - place * out_channels;
  const int group = channel / conv.out_channels, of_group = channel - group * conv.out_channels;

  Im2colRow rows[kThinPixels];
  const auto band_of = [&](int i, Im2colRow& row) {
    const uint32_t pixel = place * kThinPixels + i;
    const uint32_t block = pixel / p.pixels, index = pixel - block * p.pixels;
    row = Im2colRow::at(m, BlockOrigin(m, block), index);
    return BandNorms<Norm>(conv, /*group=*/0, (block << m.log2_block()) + index);
  };
  static_assert(kThinPixels == 4);
  const BandNorms<Norm> bands[kThinPixels] = {band_of(0, rows[0]), band_of(1, rows[1]),
                                              band_of(2, rows[2]), band_of(3, rows[3])};

  const Norm tau = conv.tau.value();
  const int steps = m.positions * p.depth_blocks;
  const int weight_blocks = ((conv.out_channels - 1) >> conv.log2_block_m) + 1;
  const Norm* const norm_weight =
      conv.norm_weight + (group * weight_blocks + (of_group >> conv.log2_block_m)) * steps;
  const auto* const weight = static_cast<const Element*>(conv.weight.data) + channel;
  const auto* const input = static_cast<const Element*>(m.data) + group * p.channels;
  Norm sums[kThinPixels] = {};

  // The pixels for which a step is valid, a bit for each.
  const auto mask_of = [&](int step) {
    uint32_t mask = 0;
    if (step >= steps) return mask;
    const int position = step / p.depth_blocks, depth_block = step - position * p.depth_blocks;
    const Norm of_weight = norm_weight[step];
#pragma unroll
    for (int i = 0; i < kThinPixels; ++i) {
      const bool exists = bands[i].exists();
      const Norm skip_norm =
          exists ? bands[i].at(conv, position, group * p.depth_blocks + depth_block) : Norm{0};
      mask |= static_cast<uint32_t>(exists && is_valid_im2col(of_weight, skip_norm, tau)) << i;
    }
    return mask;
  };
  // Adds the products of kWidth channels.
  const auto add = [&](const WindowStep& step, int position, int channel_in, uint32_t mask) {
    Norm weights[kWidth];
#pragma unroll
    for (int w = 0; w < kWidth; ++w) {
      const int64_t row = position * p.channels + channel_in + w;
      weights[w] = mask != 0 ? widen(weight[row * out_channels]) : Norm{0};
    }
#pragma unroll
    for (int i = 0; i < kThinPixels; ++i) {
      const bool valid = mask >> i & 1;
      Line line{};
      if (valid && step.is_inside(m, rows[i].row, rows[i].column)) {
        const int64_t pixel = rows[i].input_pixel + step.pixels;
        line = *reinterpret_cast<const Line*>(input + pixel * m.channels + channel_in);
      }
#pragma unroll
      for (int w = 0; w < kWidth; ++w) {
        const Norm sum = fma(weights[w], widen(line.entries[w]), sums[i]);
        if (valid) sums[i] = sum;
      }
    }
  };

  // The loads of kTogether steps wait together.
  constexpr int kTogether = 4;
  for (int first = 0; first < steps; first += kTogether) {
    uint32_t masks[kTogether];
#pragma unroll
    for (int s = 0; s < kTogether; ++s) masks[s] = mask_of(first + s);
#pragma unroll
    for (int s = 0; s < kTogether; ++s) {
      const int position = (first + s) / p.depth_blocks;
      const WindowStep step(m, min(position, m.positions - 1));
      if constexpr (kOnce) {
        add(step, position, 0, masks[s]);
      } else if (masks[s] != 0) {
        const int begin = (first + s - position * p.depth_blocks) << conv.log2_block_k;
        const int end = min(p.channels, begin + (1 << conv.log2_block_k));
        for (int c = begin; c < end; c += kWidth) add(step, position, c, masks[s]);
      }
    }
  }

  const Norm bias = conv.bias ? widen(static_cast<const Element*>(conv.bias)[channel]) : Norm{0};
#pragma unroll
  for (int i = 0; i < kThinPixels; ++i) {
    if (rows[i].output_pixel < 0) continue;
    Norm sum = sums[i];
    if (conv.bias) sum += bias;
    if (conv.relu && sum < 0) sum = 0;  // keeps NaN, like torch's relu
    const int64_t to = static_cast<int64_t>(rows[i].output_pixel) * out_channels + channel;
    static_cast<Element*>(conv.output)[to] = narrow<Element>(sum);
  }
}

}  // namespace spamm::kernels
