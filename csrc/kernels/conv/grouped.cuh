// A convolution whose groups have few channels each, such as a depthwise one, for sm_80 and newer,
// and the norms of its im2col blocks. Tensor cores would multiply zeros: a block's K has at least
// 32 channels. Here each thread computes a few pixels of one output channel, entry by entry.
//
// Neighbouring threads have neighbouring channels, so loads of channels-last memory and of norms
// lie side by side. Norms are (pixel blocks or pixels, kernel positions, groups): to the classes of
// sm80/conv.cuh that is one matrix whose channels come in one block for each group.
#pragma once

#include "kernels/conv/sm80/conv.cuh"
#include "kernels/norm_map/chunk.cuh"

namespace spamm::kernels {

constexpr int kGroupedThreads = 256;
constexpr int kGroupedPixels = 4;  // of a thread

// The entries that one group has in a block. kWidth channels are read at a time.
template <class Element, int kWidth>
class GroupBlock {
  using Norm = NormOf<Element>;

 public:
  __device__ GroupBlock(const GroupedParams<Norm>& p, int block, int kernel_position, int group)
      : p_(p),
        origin_(p.conv.pixels, block),
        step_(p.conv.pixels, kernel_position),
        first_(static_cast<const Element*>(p.conv.pixels.data) + group * p.channels) {}

  // Adds all entries up by `add`(sum, entry). Sums of eight pixels keep chains of roundings short.
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
        Norm line = 0;
        for (int c = 0; c < p_.channels; c += kWidth) {
          const auto entries = *reinterpret_cast<const Neighbours<Element, kWidth>*>(from + c);
#pragma unroll
          for (int w = 0; w < kWidth; ++w) line = add(line, widen(entries.entries[w]));
        }
        run += line;
      }
      total += run;
    }
    return total;
  }

 private:
  const GroupedParams<Norm>& p_;
  BlockOrigin origin_;
  WindowStep step_;
  const Element* first_;
};

// The norm of a block whose sum of squares is not safe. It is rare, so it is not inlined.
template <class Element, int kWidth>
__device__ __noinline__ NormOf<Element> scaled_norm(const GroupBlock<Element, kWidth>& block) {
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
__global__ void __launch_bounds__(kGroupedThreads)
    grouped_norms(const __grid_constant__ GroupedParams<NormOf<Element>> p) {
  const Im2colMatrix& m = p.conv.pixels;
  const uint32_t number = blockIdx.x * kGroupedThreads + threadIdx.x;
  const uint32_t line = number / p.groups, group = number - line * p.groups;
  const uint32_t block = line / m.positions, kernel_position = line - block * m.positions;
  if (block >= static_cast<uint32_t>(m.block_count())) return;
  const GroupBlock<Element, kWidth> of_group(p, block, kernel_position, group);
  using Norm = NormOf<Element>;
  bool nonzero = false;
  const Norm squares = of_group.sum([&](Norm sum, Norm x) {
    nonzero |= !(x == 0);
    return fma(x, x, sum);
  });
  p.norms[number] = nonzero && !is_safe(squares) ? scaled_norm(of_group) : sqrt(squares);
}

template <class Element, int kWidth>
__global__ void __launch_bounds__(kGroupedThreads)
    conv_grouped(const __grid_constant__ GroupedParams<NormOf<Element>> p) {
  using Norm = NormOf<Element>;
  using Line = Neighbours<Element, kWidth>;
  const ConvSm80Params<Norm>& conv = p.conv;
  const Im2colMatrix& m = conv.pixels;
  const uint32_t out_channels = p.groups * conv.out_channels;
  const uint32_t number = blockIdx.x * kGroupedThreads + threadIdx.x;
  const uint32_t place = number / out_channels, channel = number - place * out_channels;
  const int group = channel / conv.out_channels, of_group = channel - group * conv.out_channels;

  Im2colRow rows[kGroupedPixels];
  const auto band_of = [&](int i, Im2colRow& row) {
    const uint32_t pixel = place * kGroupedPixels + i;
    const uint32_t block = pixel / p.pixels, index = pixel - block * p.pixels;
    row = Im2colRow::at(m, BlockOrigin(m, block), index);
    return BandNorms<Norm>(conv, /*group=*/0, (block << m.log2_block()) + index);
  };
  static_assert(kGroupedPixels == 4);
  const BandNorms<Norm> bands[kGroupedPixels] = {band_of(0, rows[0]), band_of(1, rows[1]),
                                                 band_of(2, rows[2]), band_of(3, rows[3])};

  const Norm tau = conv.tau.value();
  const Norm* const norm_weight =
      conv.norm_weight + (group * (((conv.out_channels - 1) >> conv.log2_block_m) + 1) +
                          (of_group >> conv.log2_block_m)) *
                             m.positions;
  const Element* weight =
      static_cast<const Element*>(conv.weight.data) + channel * conv.weight.leading;
  const Element* const input = static_cast<const Element*>(m.data) + group * p.channels;
  Norm sums[kGroupedPixels] = {};
  for (int position = 0; position < m.positions; ++position, weight += p.channels) {
    const WindowStep step(m, position);
    const Norm of_weight = norm_weight[position];
    uint32_t valid = 0;
#pragma unroll
    for (int i = 0; i < kGroupedPixels; ++i) {
      if (!bands[i].exists()) continue;
      const Norm skip_norm = bands[i].at(conv, position, group);
      valid |= static_cast<uint32_t>(is_valid_im2col(of_weight, skip_norm, tau)) << i;
    }
    if (valid == 0) continue;
    for (int c = 0; c < p.channels; c += kWidth) {
      const Line weights = *reinterpret_cast<const Line*>(weight + c);
#pragma unroll
      for (int i = 0; i < kGroupedPixels; ++i) {
        if ((valid >> i & 1) == 0) continue;
        Line entries{};
        if (step.is_inside(m, rows[i].row, rows[i].column)) {
          const int64_t pixel = rows[i].input_pixel + step.pixels;
          entries = *reinterpret_cast<const Line*>(input + pixel * m.channels + c);
        }
#pragma unroll
        for (int w = 0; w < kWidth; ++w) {
          sums[i] = fma(widen(weights.entries[w]), widen(entries.entries[w]), sums[i]);
        }
      }
    }
  }

  const Norm bias = conv.bias ? widen(static_cast<const Element*>(conv.bias)[channel]) : Norm{0};
#pragma unroll
  for (int i = 0; i < kGroupedPixels; ++i) {
    if (rows[i].output_pixel < 0) continue;
    Norm sum = sums[i];
    if (conv.bias) sum += bias;
    if (conv.relu && sum < 0) sum = 0;  // keeps NaN, like torch's relu
    static_cast<Element*>(
        conv.output)[static_cast<int64_t>(rows[i].output_pixel) * out_channels + channel] =
        narrow<Element>(sum);
  }
}

}  // namespace spamm::kernels
