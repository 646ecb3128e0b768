// The parameters of the norm kernel. Lines are the contiguous dimension of a matrix: the rows of a
// row-major one, the columns of a column-major one.
#pragma once

#include <cstdint>

namespace spamm::kernels {

constexpr int kLog2NormThreads = 8,
              kNormThreads = 1 << kLog2NormThreads;  // of a thread block, at most

template <class Norm>
struct NormMapParams {
  const void* data;
  int64_t batch, lines, length;                     // length: entries of a line
  int64_t batch_stride, line_stride, entry_stride;  // in elements
  int log2_block_lines, log2_block_length;
  bool vector;  // whether address and strides allow loads of 16 bytes along the lines
  Norm* norms;  // may be null in a launch that copies
  int64_t norm_batch_stride, norm_line_stride, norm_entry_stride;
  // The place that the lines are copied to, if not null. Its address and strides, in entries, are
  // multiples of 16 bytes; a line ends in zeros up to such a multiple.
  void* copy;
  int64_t copy_batch_stride, copy_line_stride;
};

}  // namespace spamm::kernels
