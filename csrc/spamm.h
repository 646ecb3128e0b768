// SpAMM from its stages.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <tuple>

#include "arguments.h"
#include "block.h"

namespace spamm {

// Whether the norm map of `a` is also that of `b`: they are one matrix, cut alike.
bool share_norm_map(const Tensor& a, const Tensor& b, const Block& block);

// The norm maps of a and b: those that are given, the others computed. They may be one tensor.
std::tuple<Tensor, Tensor> norm_maps_of(const ProductArguments& product);

// Writes a checked product to `c`, and its norm map to `norms` unless that is undefined.
using WriteProduct = void(const ProductArguments& product, const Block& block, const Tensor& c,
                          const Tensor& norms);

// Replaces the lower triangle of each matrix in `c` by the mirror image of the upper one.
void mirror_upper(const Tensor& c);

// Calls one op for each stage. `c` and `norms` may share memory with any argument. A device that
// fuses stages falls back on it.
WriteProduct product_by_stages;

// The ops spamm and spamm_with_norms: the result, and its norm map if that is wanted. `write` need
// not write to memory that it reads.
std::tuple<Tensor, Tensor> new_product(ProductArguments& product, bool wants_norms,
                                       WriteProduct* write);

// The op spamm_into. `write` must be able to write to memory that it reads, as the caller gives it.
void product_into_given(ProductArguments& product, WriteProduct* write);

// A device's ops of whole products, by its functions.
template <WriteProduct write_new, WriteProduct write_given>
struct ProductOps {
  static Tensor spamm(ProductArguments& product) {
    return std::get<0>(new_product(product, /*wants_norms=*/false, write_new));
  }
  static std::tuple<Tensor, Tensor> spamm_with_norms(ProductArguments& product) {
    return new_product(product, /*wants_norms=*/true, write_new);
  }
  static void spamm_into(ProductArguments& product) { product_into_given(product, write_given); }

  static void register_in(torch::Library& library) {
    library.impl("spamm", boxed<&spamm>());
    library.impl("spamm_with_norms", boxed<&spamm_with_norms>());
    library.impl("spamm_into", boxed<&spamm_into>());
  }
};

}  // namespace spamm
