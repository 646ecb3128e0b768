// The order in which the norm kernels read a batch of matrices.
#pragma once

#include <ATen/core/Tensor.h>

#include "block.h"
#include "kernels/norm_map/params.h"

namespace spamm::cuda {

// The kernels read along lines, which have the shorter stride. Whether the lines are rows.
inline bool lines_are_rows(const at::Tensor& a) {
  return a.size(2) == 1 || a.stride(2) <= a.stride(1) || a.size(1) == 1;
}

// The norm kernels' parameters for `a` (batch, rows, columns). No map is written if `norms` is
// undefined.
template <class Norm>
kernels::NormMapParams<Norm> norm_map_params(const at::Tensor& a, int64_t block_rows,
                                             int64_t block_columns, const at::Tensor& norms) {
  const bool by_rows = lines_are_rows(a);
  const int64_t line = by_rows ? 1 : 2, entry = by_rows ? 2 : 1;
  kernels::NormMapParams<Norm> p{};
  p.data = a.const_data_ptr();
  p.batch = a.size(0), p.lines = a.size(line), p.length = a.size(entry);
  p.batch_stride = a.stride(0), p.line_stride = a.stride(line), p.entry_stride = a.stride(entry);
  p.log2_block_lines = log2_of(by_rows ? block_rows : block_columns);
  p.log2_block_length = log2_of(by_rows ? block_columns : block_rows);
  if (norms.defined()) {
    p.norms = norms.mutable_data_ptr<Norm>();
    p.norm_batch_stride = norms.stride(0);
    p.norm_line_stride = norms.stride(line), p.norm_entry_stride = norms.stride(entry);
  }

  const auto aligned = [&](int64_t size, int64_t stride) {
    return size == 1 || stride * a.element_size() % 16 == 0;
  };
  p.vector = p.entry_stride == 1 && aligned(p.lines, p.line_stride) &&
             aligned(p.batch, p.batch_stride) && reinterpret_cast<uintptr_t>(p.data) % 16 == 0;
  return p;
}

}  // namespace spamm::cuda
