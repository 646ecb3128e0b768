// Parts that the devices' ops of whole products share.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdint>
#include <tuple>

#include "arguments.h"
#include "block.h"

namespace spamm {

// Tells whether two tensors are the same elements in the same order.
inline bool is_same_view(const at::Tensor& x, const at::Tensor& y) {
  return x.is_same(y) ||
         (x.const_data_ptr() == y.const_data_ptr() && x.scalar_type() == y.scalar_type() &&
          x.device() == y.device() && x.sizes() == y.sizes() && x.strides() == y.strides());
}

// Tells whether the memory from the first to the last element of `x` and that of `y` meet.
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

// Tells whether the norm map of `a` is also that of `b`: they are one matrix, cut alike.
bool share_norm_map(const Tensor& a, const Tensor& b, const Block& block);

// The norm maps of a and b: those that are given, the others computed. They may be one tensor.
std::tuple<Tensor, Tensor> norm_maps_of(const ProductArguments& product);

// Writes a checked product to `c`, and its norm map to `norms` unless that is undefined.
using WriteProduct = void(const ProductArguments& product, const Block& block, const Tensor& c,
                          const Tensor& norms);

// Replaces the lower triangle of each matrix in `c` by the mirror image of the upper one.
void mirror_upper(const Tensor& c);

using EmptyTensor = Tensor(IntArrayRef shape, at::ScalarType dtype, at::Device device);

// The results of the ops spamm and spamm_with_norms.
struct NewProduct {
  Block block;
  Tensor c, norms;
  bool is_computed;
};

// Checks the arguments. Over several devices the results are computed here; else they are memory of
// `empty`. The norm map is undefined unless it is wanted.
NewProduct new_product(ProductArguments& product, bool wants_norms, EmptyTensor* empty);

// The op spamm_into. `write` must be able to write to memory that it reads, as the caller gives it.
void product_into_given(ProductArguments& product, WriteProduct* write);

// A device's ops of whole products, by its functions.
template <EmptyTensor empty, WriteProduct write_new, WriteProduct write_given>
struct ProductOps {
  static NewProduct computed(ProductArguments& product, bool wants_norms) {
    NewProduct result = new_product(product, wants_norms, empty);
    // It need not write to memory that it reads.
    if (!result.is_computed) write_new(product, result.block, result.c, result.norms);
    return result;
  }
  static Tensor spamm(ProductArguments& product) { return computed(product, false).c; }
  static std::tuple<Tensor, Tensor> spamm_with_norms(ProductArguments& product) {
    const NewProduct result = computed(product, /*wants_norms=*/true);
    return {result.c, result.norms};
  }
  static void spamm_into(ProductArguments& product) { product_into_given(product, write_given); }

  static void register_in(torch::Library& library) {
    library.impl("spamm", boxed<&spamm>());
    library.impl("spamm_with_norms", boxed<&spamm_with_norms>());
    library.impl("spamm_into", boxed<&spamm_into>());
  }
};

}  // namespace spamm
