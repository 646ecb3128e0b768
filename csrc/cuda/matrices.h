// Matrices as numbers. No torch header: files that nvcc compiles would take several times as long.
#pragma once

#include <array>
#include <cstdint>

namespace spamm::cuda {

constexpr int64_t kAlignment = 16;

// A batch of matrices, or a matrix as a batch of one: address, sizes and strides (in elements) of
// (batch, rows, columns). Plain numbers, because a view takes the host as long as a call through
// the dispatcher. The tensor must outlive them.
class Matrices {
 public:
  template <class Tensor>
  requires requires(const Tensor& x) { x.const_data_ptr(); }
  Matrices(const Tensor& x)  // NOLINT: a tensor serves wherever matrices do
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

}  // namespace spamm::cuda
