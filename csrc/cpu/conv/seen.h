// What the output sees of the input at one kernel position.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>

#include "block.h"
#include "conv/shape.h"
#include "cpu/multiply/valid_masks.h"

namespace spamm::cpu {

class Seen {
 public:
  Seen(const ConvShape& shape, int64_t kernel_position)
      : shape_(shape),
        down_(kernel_position / shape.kernel.width * shape.dilation.height - shape.padding.height),
        right_(kernel_position % shape.kernel.width * shape.dilation.width - shape.padding.width) {}

  // The input row that an output row reads; nothing if it is padding.
  std::optional<int64_t> row(int64_t output_row) const {
    const int64_t row = output_row * shape_.stride.height + down_;
    if (row < 0 || row >= shape_.input.height) return std::nullopt;
    return row;
  }

  // The output columns that do not read padding.
  Range columns() const {
    const int64_t stride = shape_.stride.width;
    const int64_t begin = right_ < 0 ? blocks_of(-right_, stride) : 0;
    const int64_t end =
        right_ < shape_.input.width ? blocks_of(shape_.input.width - right_, stride) : 0;
    return {begin, std::max<int64_t>(std::min(end, shape_.output.width) - begin, 0)};
  }

  // The input column that one of these output columns reads.
  int64_t column(int64_t output_column) const {
    return output_column * shape_.stride.width + right_;
  }

 private:
  const ConvShape& shape_;
  int64_t down_, right_;
};

}  // namespace spamm::cpu
