// The weight of a convolution, packed for the microkernel. A panel holds some output channels as
// [kernel position][input channel][output channel], in VNNI layout for matrix instructions.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <cstdint>

#include "conv/shape.h"
#include "cpu/common/large_pages.h"
#include "cpu/multiply/microkernel.h"
#include "cpu/multiply/panels.h"

namespace spamm::cpu {

// T: type of the weight. P: type of the panels.
template <class T, class P>
class WeightPanels {
 public:
  // `depth`: input channels of a group in the panels. Those beyond the group's own are zero.
  WeightPanels(const at::Tensor& weight, const ConvShape& shape, int64_t width, int64_t depth)
      : width_(width),
        depth_(depth),
        kernel_positions_(shape.kernel_positions()),
        panels_(blocks_of(shape.group_out_channels(), width)) {
    const int64_t count = shape.groups * panels_ * kernel_positions_;
    data_ = with_large_pages(
        at::empty({count * depth * width * static_cast<int64_t>(sizeof(P))}, at::kByte));
    const auto strides = weight.strides();
    first_ = static_cast<P*>(data_.mutable_data_ptr());
    at::parallel_for(0, count, 1, [&](int64_t from, int64_t to) {
      for (int64_t task = from; task < to; ++task) {
        const int64_t kernel_position = task % kernel_positions_,
                      panel = task / kernel_positions_ % panels_;
        const int64_t group = task / kernel_positions_ / panels_;
        const int64_t channel = group * shape.group_out_channels() + panel * width;
        const int64_t columns = std::min(width, shape.group_out_channels() - panel * width);
        const View<T> source{weight.const_data_ptr<T>() + channel * strides[0] +
                                 kernel_position / shape.kernel.width * strides[2] +
                                 kernel_position % shape.kernel.width * strides[3],
                             strides[1], strides[0], shape.group_in_channels(), columns};
        P* target = first_ + task * depth * width;
        if constexpr (Microkernel<P>::kVnni) {
          copy_vnni(source, target, width);
        } else {
          copy_rows(source, target, width, width);
        }
      }
    });
  }

  // The panel's rows from input channel `channel` on, which is even for matrix instructions.
  const P* rows(int64_t group, int64_t panel, int64_t kernel_position, int64_t channel) const {
    return first_ +
           (((group * panels_ + panel) * kernel_positions_ + kernel_position) * depth_ + channel) *
               width_;
  }

  int64_t width() const { return width_; }

 private:
  int64_t width_, depth_, kernel_positions_, panels_;
  at::Tensor data_;
  P* first_;
};

}  // namespace spamm::cpu
