// Operands that the multiply kernels can read: contiguous along rows or columns, with the address
// and all other strides multiples of 16 bytes. Such operands are used in place. All others are
// copied into an aligned row-major buffer, for example a slice that starts off the 16-byte grid, or
// a matrix with two strides above 1.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include "kernels/multiply/params.h"

namespace spamm::cuda {

constexpr int64_t kAlignment = 16;

// The stride of a dimension; 0 if its size is at most 1.
inline int64_t step(const at::Tensor& x, int64_t dim) {
  return x.size(dim) > 1 ? x.stride(dim) : 0;
}

// Whether kernels can read x (batch, rows, columns) with dimension `contiguous` as the contiguous
// one. `leading` is the other one of rows and columns.
inline bool reads_along(const at::Tensor& x, int64_t contiguous, int64_t leading) {
  const auto aligned = [&](int64_t stride) { return stride * x.element_size() % kAlignment == 0; };
  return (x.size(contiguous) <= 1 || x.stride(contiguous) == 1) && aligned(step(x, leading)) &&
         aligned(step(x, 0)) && reinterpret_cast<uintptr_t>(x.const_data_ptr()) % kAlignment == 0;
}

// An aligned row-major copy of x; a broadcast batch is copied once.
inline at::Tensor aligned_copy(const at::Tensor& x) {
  const at::Tensor source = step(x, 0) == 0 ? x.narrow(0, 0, 1) : x;
  const int64_t unit = kAlignment / x.element_size();
  const int64_t leading = (x.size(2) + unit - 1) / unit * unit;
  const at::Tensor copy = at::empty({source.size(0), x.size(1), leading}, x.options());
  return copy.narrow(2, 0, x.size(2)).copy_(source).expand(x.sizes());
}

// x itself if the kernels can read it, else an aligned copy.
inline at::Tensor readable(const at::Tensor& x) {
  const bool in_place = x.numel() == 0 || reads_along(x, 2, 1) || reads_along(x, 1, 2);
  return in_place ? x : aligned_copy(x);
}

// `x` (batch, rows, columns) is a result of readable() and must outlive the launch. `k_dim` is its
// dimension along K.
inline kernels::Operand operand(const at::Tensor& x, int64_t k_dim) {
  const int64_t contiguous = reads_along(x, 2, 1) ? 2 : 1;
  return {x.const_data_ptr(), step(x, 0), step(x, contiguous == 2 ? 1 : 2), contiguous == k_dim};
}

}  // namespace spamm::cuda
