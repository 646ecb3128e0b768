// Which tensors share memory.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>

namespace spamm {

// Whether two tensors are the same elements in the same order.
inline bool is_same_view(const at::Tensor& x, const at::Tensor& y) {
  return x.is_same(y) ||
         (x.const_data_ptr() == y.const_data_ptr() && x.scalar_type() == y.scalar_type() &&
          x.device() == y.device() && x.sizes() == y.sizes() && x.strides() == y.strides());
}

// Whether the memory from the first to the last element of `x` and that of `y` meet.
inline bool may_overlap(const at::Tensor& x, const at::Tensor& y) {
  if (x.numel() == 0 || y.numel() == 0 || x.device() != y.device()) return false;
  const auto first = [](const at::Tensor& t) {
    return reinterpret_cast<uintptr_t>(t.const_data_ptr());
  };
  const auto end = [&](const at::Tensor& t) {
    int64_t last = 0;
    for (int64_t dim = 0; dim < t.dim(); ++dim) last += (t.size(dim) - 1) * t.stride(dim);
    return first(t) + (last + 1) * t.element_size();
  };
  return std::max(first(x), first(y)) < std::min(end(x), end(y));
}

}  // namespace spamm
