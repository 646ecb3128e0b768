// A convolution's input as the product reads it, the norms of its pixels, and those of the im2col
// matrix's blocks, without the matrix. One pixel of several images is a block of the im2col matrix
// for every kernel position that reads it, so its norm is computed once for all of them.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "block.h"
#include "conv/backend.h"
#include "conv/shape.h"
#include "cpu/multiply/slice_kernel.h"
#include "cpu/norm_map/strip_norms.h"

namespace spamm::cpu {

// The type of the norms of a tensor of type T.
template <class T>
using NormOf = std::conditional_t<std::is_same_v<T, double>, double, float>;

// Pixels whose channels are contiguous; distances in elements.
template <class P>
struct Pixels {
  const P* first;
  int64_t image_stride, row_stride, column_stride, group_stride;
  int64_t depth;  // channels of a group, as stored

  const P* at(int64_t image, int64_t row, int64_t column, int64_t group) const {
    return first + image * image_stride + row * row_stride + column * column_stride +
           group * group_stride;
  }
};

// The norms of `block_images` images x one pixel x `block_channels` channels of a group.
template <class N>
class PixelNorms {
 public:
  PixelNorms(const ConvShape& shape, int64_t block_images, int64_t block_channels)
      : shape_(shape),
        block_images_(block_images),
        block_channels_(block_channels),
        image_blocks_(blocks_of(shape.images, block_images)),
        channel_blocks_(blocks_of(shape.group_in_channels(), block_channels)),
        norms_(at::empty(
            {image_blocks_, shape.input.height * shape.input.width * shape.groups, channel_blocks_},
            c10::CppTypeToScalarType<N>::value)),
        first_(norms_.template mutable_data_ptr<N>()) {}

  // Norms of one pixel and group: one norm for each channel block. Those of neighbouring columns
  // are column_stride() apart.
  const N* at(int64_t image_block, int64_t row, int64_t column, int64_t group) const {
    return first_ +
           ((image_block * shape_.input.height + row) * shape_.input.width + column) *
               column_stride() +
           group * channel_blocks_;
  }

  int64_t channel_blocks() const { return channel_blocks_; }
  int64_t column_stride() const { return shape_.groups * channel_blocks_; }

  // Computes all norms.
  template <class P>
  void compute(const Pixels<P>& pixels) {
    const int64_t elements =
        shape_.input.width * shape_.in_channels * std::min(block_images_, shape_.images);
    constexpr int64_t kElementsPerTask = 32 << 10;  // with fewer, starting a thread does not pay
    at::parallel_for(0, image_blocks_ * shape_.input.height,
                     blocks_of(kElementsPerTask, std::max<int64_t>(elements, 1)),
                     [&](int64_t from, int64_t to) {
                       for (int64_t task = from; task < to; ++task) {
                         compute_columns(pixels, task / shape_.input.height,
                                         task % shape_.input.height, 0, shape_.input.width);
                       }
                     });
  }

  // Computes the norms of columns [begin, end) of one row.
  template <class P>
  void compute_columns(const Pixels<P>& pixels, int64_t image_block, int64_t row, int64_t begin,
                       int64_t end) {
    static_assert(kStrip % 128 == 0, "a strip holds whole blocks");
    const int64_t channels = shape_.group_in_channels();
    const int64_t first_image = image_block * block_images_;
    const int64_t images = std::min(block_images_, shape_.images - first_image);
    const auto compute_run = [&](int64_t column, int64_t group, int64_t length) {
      const P* data = pixels.at(first_image, row, column, group);
      N* norms = const_cast<N*>(at(image_block, row, column, group));
      for (int64_t c = 0; c < length; c += kStrip) {
        strip_norms(Strip<P>{data + c, pixels.image_stride, images, std::min(kStrip, length - c)},
                    block_channels_, norms + c / block_channels_, 1);
      }
    };
    // Whole blocks of channels that follow each other in memory are one long run.
    const bool whole_blocks = channels % block_channels_ == 0;
    if (whole_blocks && pixels.group_stride == channels &&
        pixels.column_stride == shape_.in_channels) {
      compute_run(begin, 0, (end - begin) * shape_.in_channels);
      return;
    }
    for (int64_t column = begin; column < end; ++column)
      for (int64_t group = 0; group < shape_.groups; ++group) compute_run(column, group, channels);
  }

 private:
  ConvShape shape_;
  int64_t block_images_, block_channels_, image_blocks_, channel_blocks_;
  at::Tensor norms_;  // (image blocks, pixels x groups, channel blocks)
  N* first_;
};

// Tells whether each run of `edge` numbers, in each of some neighbouring groups of `channels`, has
// a magnitude of `limit` or NaN. A group of zeros need not: its products change nothing.
template <class P>
SPAMM_CPU_CLONES static bool all_reach(const P* group, int64_t groups, int64_t channels,
                                       int64_t edge, P limit) {
  using Integer = UnsignedOf<P>;  // in the same order
  Integer least;
  std::memcpy(&least, &limit, sizeof(limit));
  for (const P* const end = group + groups * channels; group < end; group += channels) {
    bool reached = true, zero = true;
    for (int64_t first = 0; first < channels; first += edge) {
      Integer largest = 0;
      for (int64_t c = first; c < std::min(first + edge, channels); ++c) {
        Integer bits;
        std::memcpy(&bits, group + c, sizeof(P));
        largest = std::max(largest, bits & (~Integer{0} >> 1));
      }
      reached &= largest >= least;
      zero &= largest == 0;
    }
    if (!reached && !zero) return false;
  }
  return true;
}

// Tells whether surely nothing is skipped but zeros: where a number alone is large enough, so is
// its block's norm. Much faster than the norms.
template <class P>
bool all_valid(const Convolution& conv, const Pixels<P>& pixels, double tau) {
  constexpr P kNorm = 1 - 4 * std::numeric_limits<P>::epsilon();  // of 1, at least
  const ConvShape& shape = conv.shape;
  const at::Tensor norm_weight = conv.norm_weight->contiguous();
  const P *const norms = norm_weight.template const_data_ptr<P>(), threshold = static_cast<P>(tau);
  const P least = *std::min_element(norms, norms + norm_weight.numel());
  const P limit = threshold / least / kNorm / kNorm;
  if (!(least * (limit * kNorm) >= threshold && limit > 0)) return false;
  std::atomic<bool> result{true};
  // Pixels that follow each other in memory are like groups.
  const int64_t together = pixels.column_stride == shape.in_channels ? shape.input.width : 1;
  const int64_t elements = std::max<int64_t>(shape.input.width * shape.in_channels, 1);  // of a row
  at::parallel_for(
      0, shape.images * shape.input.height, blocks_of(64 << 10, elements),
      [&](int64_t row, int64_t end) {
        for (; row < end && result; ++row)
          for (int64_t column = 0; column < shape.input.width; column += together)
            if (!all_reach(pixels.at(row / shape.input.height, row % shape.input.height, column, 0),
                           together * shape.groups, pixels.depth, conv.block.k, limit))
              result = false;
      });
  return result;
}

// The norms (groups, K blocks, pixel blocks) of the im2col matrix.
template <class N>
at::Tensor column_norms(const Convolution& conv, const PixelNorms<N>& pixels) {
  const ConvShape& shape = conv.shape;
  const Box &grid = conv.blocks.grid, &edge = conv.blocks.edge, count = conv.blocks.count();
  const int64_t channel_blocks = pixels.channel_blocks(), stride = volume(count);
  const int64_t rows = count[0] * count[1], positions = shape.kernel_positions();
  const at::Tensor result = at::empty({shape.groups, positions * channel_blocks, stride},
                                      c10::CppTypeToScalarType<N>::value);
  N* const norms = result.template mutable_data_ptr<N>();
  const auto norm_of_block = [&](int64_t group, const Box& block, int64_t position, int64_t b) {
    const int64_t last_row = std::min((block[1] + 1) * edge[1], grid[1]);
    const int64_t last_column = std::min((block[2] + 1) * edge[2], grid[2]);
    const auto each = [&](const auto& visit) {
      for (int64_t row = block[1] * edge[1]; row < last_row; ++row)
        for (int64_t column = block[2] * edge[2]; column < last_column; ++column)
          if (const auto seen = shape.seen_by(row, column, position))
            visit(pixels.at(block[0], seen->height, seen->width, group)[b]);
    };
    N largest = 0;
    each([&](N x) {
      if (x > largest || std::isnan(x)) largest = x;
    });
    if (edge[1] * edge[2] == 1) return largest;  // that of one pixel
    return static_cast<N>(scaled_norm(largest, each));
  };
  constexpr int64_t kNormsPerTask = 4096;
  at::parallel_for(0, shape.groups * positions * rows,
                   blocks_of(kNormsPerTask, std::max<int64_t>(count[2] * channel_blocks, 1)),
                   [&](int64_t from, int64_t to) {
                     for (int64_t task = from; task < to; ++task) {
                       const int64_t row = task % rows, k = task / rows;  // (group, position)
                       N* const first = norms + k * channel_blocks * stride + row * count[2];
                       for (int64_t c = 0; c < count[2]; ++c)
                         for (int64_t b = 0; b < channel_blocks; ++b)
                           first[b * stride + c] =
                               norm_of_block(k / positions, {row / count[1], row % count[1], c},
                                             k % positions, b);
                     }
                   });
  return result;
}

}  // namespace spamm::cpu
