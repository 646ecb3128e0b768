// Matrices as numbers, and which of them the multiply kernels can read in place.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <array>

#include "block.h"
#include "kernels/multiply/params.h"

namespace spamm::cuda {

constexpr int64_t kAlignment = 16;

// A matrix as a batch of one.
inline at::Tensor as_batch(const at::Tensor& x) { return x.dim() == 3 ? x : x.unsqueeze(0); }

// A batch of matrices, or a matrix as a batch of one: address, sizes and strides (in elements) of
// (batch, rows, columns). Plain numbers, because a view takes the host as long as a call through
// the dispatcher. The tensor must outlive them.
class Matrices {
 public:
  Matrices(const at::Tensor& x)  // NOLINT: a tensor serves wherever matrices do
      : data_(x.const_data_ptr()), element_size_(static_cast<int64_t>(x.element_size())) {
    const int64_t missing = 3 - x.dim();
    for (int64_t dim = missing; dim < 3; ++dim) {
      sizes_[dim] = x.size(dim - missing), strides_[dim] = x.stride(dim - missing);
    }
  }

  const void* data() const { return data_; }
  int64_t element_size() const { return element_size_; }
  int64_t size(int64_t dim) const { return sizes_[dim]; }
  int64_t stride(int64_t dim) const { return strides_[dim]; }
  int64_t numel() const { return sizes_[0] * sizes_[1] * sizes_[2]; }
  Matrices first() const {  // of the batch
    Matrices result = *this;
    result.sizes_[0] = 1;
    return result;
  }

 private:
  const void* data_;
  int64_t element_size_;
  std::array<int64_t, 3> sizes_ = {1, 1, 1}, strides_ = {0, 0, 0};
};

// The stride of a dimension; 0 if its size is at most 1.
inline int64_t step(const Matrices& x, int64_t dim) { return x.size(dim) > 1 ? x.stride(dim) : 0; }

// Whether kernels can read x with dimension `contiguous` as the contiguous one: the address and all
// other strides are multiples of 16 bytes. `leading` is the other one of rows and columns.
inline bool reads_along(const Matrices& x, int64_t contiguous, int64_t leading) {
  const auto aligned = [&](int64_t stride) { return stride * x.element_size() % kAlignment == 0; };
  return (x.size(contiguous) <= 1 || x.stride(contiguous) == 1) && aligned(step(x, leading)) &&
         aligned(step(x, 0)) && reinterpret_cast<uintptr_t>(x.data()) % kAlignment == 0;
}

// An aligned row-major copy of x (batch, rows, columns); a broadcast batch is copied once.
inline at::Tensor aligned_copy(const at::Tensor& x) {
  const at::Tensor source = step(x, 0) == 0 ? x.narrow(0, 0, 1) : x;
  const int64_t unit = kAlignment / x.element_size();
  const int64_t leading = (x.size(2) + unit - 1) / unit * unit;
  const at::Tensor copy = at::empty({source.size(0), x.size(1), leading}, x.options());
  return copy.narrow(2, 0, x.size(2)).copy_(source).expand(x.sizes());
}

// x itself if the multiply kernels can read it, else an aligned copy: of a slice that starts off
// the 16-byte grid, for example, or of a matrix with two strides above 1.
inline at::Tensor readable(const at::Tensor& x) {
  const bool in_place = x.numel() == 0 || reads_along(x, 2, 1) || reads_along(x, 1, 2);
  return in_place ? x : aligned_copy(as_batch(x));
}

// `x` is a result of readable() and must outlive the launch. `k_dim` is its dimension along K.
inline kernels::Operand operand(const Matrices& x, int64_t k_dim) {
  const int64_t contiguous = reads_along(x, 2, 1) ? 2 : 1;
  return {x.data(), step(x, 0), step(x, contiguous == 2 ? 1 : 2), contiguous == k_dim};
}

}  // namespace spamm::cuda
