// A copy of a convolution's input in the memory order (row, column, image, channel), and its norms.
//
// In this order, one input pixel of several images is a plain matrix (images x channels), which is
// a block of the im2col matrix for every kernel position that reads this pixel. The block and its
// norm are therefore stored once for all kernel positions. One pass computes both.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "conv/shape.h"
#include "cpu/common/large_pages.h"
#include "cpu/multiply/microkernel.h"
#include "cpu/multiply/panels.h"
#include "cpu/norm_map/strip_norms.h"

namespace spamm::cpu {

// T: type of the input. P: type of the copy.
template <class T, class P>
class Positions {
 public:
  using N = std::conditional_t<std::is_same_v<T, double>, double, float>;

  // A norm is that of a block of `block_images` images x `block_channels` channels of a group.
  Positions(const at::Tensor& input, const ConvShape& shape, int64_t block_images,
            int64_t block_channels)
      : shape_(shape),
        block_images_(block_images),
        block_channels_(block_channels),
        image_blocks_(blocks_of(shape.images, block_images)),
        channel_blocks_(blocks_of(shape.group_in_channels(), block_channels)),
        depth_(shape.group_in_channels()) {
    if (Microkernel<P>::kVnni) depth_ += depth_ % 2;
    const int64_t pixels = shape.input.height * shape.input.width;
    data_ = with_large_pages(at::empty(
        {pixels * shape.images * row_stride() * static_cast<int64_t>(sizeof(P))}, at::kByte));
    first_ = static_cast<P*>(data_.mutable_data_ptr());
    norms_ = at::empty({pixels, image_blocks_, shape.groups, channel_blocks_},
                       input.options().dtype(norm_dtype(input.scalar_type())));
    first_norm_ = norms_.template mutable_data_ptr<N>();
    copy(input);
  }

  // The distance between images.
  int64_t row_stride() const { return shape_.groups * depth_; }

  // One pixel of a block of images: points to the first image's first channel of the group.
  const P* rows(Size2 at, int64_t image_block, int64_t group) const {
    return first_ + index(at, image_block, group);
  }

  // The norms of that pixel, one for each channel block of the group.
  const N* norms(Size2 at, int64_t image_block, int64_t group) const {
    return first_norm_ + norm_index(at, image_block, group);
  }

  // Channels of a group in the copy. Matrix instructions need an even number.
  int64_t depth() const { return depth_; }
  int64_t channel_blocks() const { return channel_blocks_; }

 private:
  // A task copies about this much before it computes the norms, so that it stays in cache.
  static constexpr int64_t kTaskBytes = 256 * 1024;

  int64_t pixel(Size2 at) const { return at.height * shape_.input.width + at.width; }

  int64_t index(Size2 at, int64_t image_block, int64_t group) const {
    return (pixel(at) * shape_.images + image_block * block_images_) * row_stride() +
           group * depth_;
  }

  int64_t norm_index(Size2 at, int64_t image_block, int64_t group) const {
    return ((pixel(at) * image_blocks_ + image_block) * shape_.groups + group) * channel_blocks_;
  }

  // A task copies a part of one row, of the images of one block.
  void copy(const at::Tensor& input) {
    const int64_t pixel_bytes = images(0) * row_stride() * static_cast<int64_t>(sizeof(P));
    const int64_t columns = std::clamp<int64_t>(kTaskBytes / pixel_bytes, 1, shape_.input.width);
    const int64_t parts = blocks_of(shape_.input.width, columns);
    at::parallel_for(0, shape_.input.height * parts * image_blocks_, 1,
                     [&](int64_t from, int64_t to) {
                       for (int64_t task = from; task < to; ++task) {
                         const int64_t image_block = task % image_blocks_;
                         const int64_t first = task / image_blocks_ % parts * columns;
                         const int64_t row = task / image_blocks_ / parts;
                         const int64_t last = std::min(first + columns, shape_.input.width);
                         copy_columns(input, row, first, last, image_block);
                         for (int64_t column = first; column < last; ++column)
                           compute_norms({row, column}, image_block);
                       }
                     });
  }

  // Reads image by image, because pixels of one image's row are neighbours in memory.
  void copy_columns(const at::Tensor& input, int64_t row, int64_t first, int64_t last,
                    int64_t image_block) {
    // Without padding between the groups, one copy serves all.
    const int64_t groups = depth_ == shape_.group_in_channels() ? 1 : shape_.groups;
    const int64_t channels = shape_.in_channels / groups, depth = row_stride() / groups;
    const auto strides = input.strides();
    const T* source = input.const_data_ptr<T>() + image_block * block_images_ * strides[0] +
                      row * strides[2] + first * strides[3];
    P* target = first_ + index({row, first}, image_block, 0);
    for (int64_t i = 0; i < images(image_block); ++i) {
      for (int64_t g = 0; g < groups; ++g) {
        const View<T> pixels{source + i * strides[0] + g * channels * strides[1], strides[3],
                             strides[1], last - first, channels};
        copy_rows(pixels, target + i * row_stride() + g * depth, shape_.images * row_stride(),
                  depth);
      }
    }
  }

  void compute_norms(Size2 at, int64_t image_block) {
    static_assert(kStrip % 128 == 0, "a strip holds whole blocks");
    for (int64_t g = 0; g < shape_.groups; ++g) {
      const P* first = rows(at, image_block, g);
      N* norms = first_norm_ + norm_index(at, image_block, g);
      for (int64_t c = 0; c < shape_.group_in_channels(); c += kStrip) {
        const int64_t channels = std::min(kStrip, shape_.group_in_channels() - c);
        strip_norms(Strip<P>{first + c, row_stride(), images(image_block), channels},
                    block_channels_, norms + c / block_channels_, 1);
      }
    }
  }

  int64_t images(int64_t image_block) const {
    return std::min(block_images_, shape_.images - image_block * block_images_);
  }

  ConvShape shape_;
  int64_t block_images_, block_channels_, image_blocks_, channel_blocks_, depth_;
  at::Tensor data_;   // bytes of P: (height, width, images, groups, depth)
  at::Tensor norms_;  // (height * width, image blocks, groups, channel blocks)
  P* first_;
  N* first_norm_;
};

}  // namespace spamm::cpu
