// A copy of a convolution's input in the memory order (row, column, image, channel).
//
// In this order, one input pixel of several images is a plain matrix (images x channels), which is
// what matrix instructions read. The copy is also where half types become float32 for machines
// without such instructions.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstdint>

#include "conv/shape.h"
#include "cpu/common/large_pages.h"
#include "cpu/conv/pixels.h"
#include "cpu/multiply/microkernel.h"
#include "cpu/multiply/panels.h"

namespace spamm::cpu {

// T: type of the input. P: type of the copy.
template <class T, class P>
class Positions {
 public:
  // Computes `norms` too, unless it is null, while the copy is in cache.
  Positions(const at::Tensor& input, const ConvShape& shape, int64_t block_images,
            PixelNorms<NormOf<T>>* norms)
      : shape_(shape), block_images_(block_images), depth_(stored_depth(shape)) {
    const int64_t pixels = shape.input.height * shape.input.width;
    const int64_t per_image = shape.groups * depth_;
    data_ = with_large_pages(at::empty(
        {pixels * shape.images * per_image * static_cast<int64_t>(sizeof(P))}, at::kByte));
    first_ = static_cast<P*>(data_.mutable_data_ptr());
    pixels_ = {
        first_, per_image, shape.input.width * shape.images * per_image, shape.images * per_image,
        depth_, depth_};
    copy(input, norms);
  }

  const Pixels<P>& pixels() const { return pixels_; }

  // Channels of a group in the copy. Matrix instructions need an even number.
  static int64_t stored_depth(const ConvShape& shape) {
    const int64_t depth = shape.group_in_channels();
    return Microkernel<P>::kVnni ? depth + depth % 2 : depth;
  }

 private:
  // A task copies about this much before it computes the norms, so that it stays in cache.
  static constexpr int64_t kTaskBytes = 256 << 10;

  // A task copies a part of one row, of the images of one block.
  void copy(const at::Tensor& input, PixelNorms<NormOf<T>>* norms) {
    const int64_t image_blocks = blocks_of(shape_.images, block_images_);
    const int64_t pixel_bytes = images(0) * pixels_.image_stride * static_cast<int64_t>(sizeof(P));
    const int64_t columns = std::clamp<int64_t>(kTaskBytes / pixel_bytes, 1, shape_.input.width);
    const int64_t parts = blocks_of(shape_.input.width, columns);
    at::parallel_for(0, shape_.input.height * parts * image_blocks, 1,
                     [&](int64_t from, int64_t to) {
                       for (int64_t task = from; task < to; ++task) {
                         const int64_t image_block = task % image_blocks;
                         const int64_t first = task / image_blocks % parts * columns;
                         const int64_t row = task / image_blocks / parts;
                         const int64_t last = std::min(first + columns, shape_.input.width);
                         copy_columns(input, row, first, last, image_block);
                         if (norms) norms->compute_columns(pixels_, image_block, row, first, last);
                       }
                     });
  }

  // Reads image by image, because pixels of one image's row are neighbours in memory.
  void copy_columns(const at::Tensor& input, int64_t row, int64_t first, int64_t last,
                    int64_t image_block) {
    // Without padding between the groups, one copy serves all.
    const int64_t groups = depth_ == shape_.group_in_channels() ? 1 : shape_.groups;
    const int64_t channels = shape_.in_channels / groups, depth = pixels_.image_stride / groups;
    const auto strides = input.strides();
    const int64_t first_image = image_block * block_images_;
    const T* source = input.const_data_ptr<T>() + first_image * strides[0] + row * strides[2] +
                      first * strides[3];
    P* target = first_ + (pixels_.at(first_image, row, first, 0) - pixels_.first);
    for (int64_t i = 0; i < images(image_block); ++i) {
      for (int64_t g = 0; g < groups; ++g) {
        const View<T> view{source + i * strides[0] + g * channels * strides[1], strides[3],
                           strides[1], last - first, channels};
        copy_rows(view, target + i * pixels_.image_stride + g * depth, pixels_.column_stride,
                  depth);
      }
    }
  }

  int64_t images(int64_t image_block) const {
    return std::min(block_images_, shape_.images - image_block * block_images_);
  }

  ConvShape shape_;
  int64_t block_images_, depth_;
  at::Tensor data_;  // bytes of P: (height, width, images, groups, depth)
  P* first_;
  Pixels<P> pixels_;
};

}  // namespace spamm::cpu
