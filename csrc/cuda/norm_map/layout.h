// The order in which the norm kernels read a batch of matrices, and where norms go.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <array>

#include "block.h"
#include "cuda/operand.h"
#include "kernels/norm_map/params.h"

namespace spamm::cuda {

// The norm kernels read along lines, which have the shorter stride. Whether the lines are rows. The
// sizes do not matter: a part of one row has the norms of the whole.
inline bool lines_are_rows(const Matrices& x) { return x.stride(2) <= x.stride(1); }

// Where norms go: the address and the strides of a map (batch, block rows, block columns).
struct MapMemory {
  void* norms = nullptr;  // null: nowhere
  std::array<int64_t, 3> strides = {};

  MapMemory() = default;
  // A contiguous map of `rows` x `columns` blocks.
  MapMemory(void* norms, int64_t rows, int64_t columns)
      : norms(norms), strides{rows * columns, columns, 1} {}
  // An undefined map is nowhere.
  MapMemory(const at::Tensor& map) {  // NOLINT: a map says where it lies
    if (!map.defined()) return;
    norms = map.mutable_data_ptr();
    std::copy_n(map.strides().begin(), 3, strides.begin());
  }
};

// The norm kernels' parameters for `x`.
template <class Norm>
kernels::NormMapParams<Norm> norm_map_params(const Matrices& x, int64_t block_rows,
                                             int64_t block_columns, const MapMemory& map) {
  const bool by_rows = lines_are_rows(x);
  const int64_t line = by_rows ? 1 : 2, entry = by_rows ? 2 : 1;
  kernels::NormMapParams<Norm> p{};
  p.data = x.data();
  p.batch = x.size(0), p.lines = x.size(line), p.length = x.size(entry);
  p.batch_stride = x.stride(0), p.line_stride = x.stride(line), p.entry_stride = x.stride(entry);
  p.log2_block_lines = log2_of(by_rows ? block_rows : block_columns);
  p.log2_block_length = log2_of(by_rows ? block_columns : block_rows);
  p.norms = static_cast<Norm*>(map.norms);
  p.norm_batch_stride = map.strides[0];
  p.norm_line_stride = map.strides[line], p.norm_entry_stride = map.strides[entry];

  const auto aligned = [&](int64_t size, int64_t stride) {
    return size == 1 || stride * x.element_size() % kAlignment == 0;
  };
  p.vector = p.entry_stride == 1 && aligned(p.lines, p.line_stride) &&
             aligned(p.batch, p.batch_stride) &&
             reinterpret_cast<uintptr_t>(p.data) % kAlignment == 0;
  return p;
}

}  // namespace spamm::cuda
