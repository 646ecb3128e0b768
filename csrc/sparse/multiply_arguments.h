// The argument list of bsr_multiply, and checks that no device has to be read for.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <limits>
#include <tuple>

#include "arguments.h"
#include "block.h"
#include "checks.h"

namespace spamm {

struct BsrMultiplyArguments {
  Tensor crow = {}, col = {}, first = {}, slots_a = {}, slots_b = {};
  Tensor crow_a = {}, col_a = {}, values_a = {}, values_b = {};
  OptTensor crow_b = {}, col_b = {}, tau = {};
  OptTensor crow_input = {}, col_input = {}, values_input = {};
  Scalar beta = 1, alpha = 1;
  bool symmetric = false, norms = true;

  static auto members(auto& x) {
    return std::tie(x.crow, x.col, x.first, x.slots_a, x.slots_b, x.crow_a, x.col_a, x.values_a,
                    x.values_b, x.crow_b, x.col_b, x.tau, x.crow_input, x.col_input, x.values_input,
                    x.beta, x.alpha, x.symmetric, x.norms);
  }

  // Of a result with so many blocks.
  Tensor empty_norms(int64_t stored) const {
    return at::empty({norms ? stored : 0},
                     values_a.options().dtype(norm_dtype(values_a.scalar_type())));
  }

  bool adds_input() const {
    return crow_input && col_input && values_input && beta.toDouble() != 0;
  }
};

// The indices of the matrix that messages call `name`.
inline void check_indices(const Tensor& crow_indices, const Tensor& col_indices, const char* name) {
  for (const Tensor* index : {&crow_indices, &col_indices}) {
    TORCH_CHECK_TYPE(index->scalar_type() == at::kInt || index->scalar_type() == at::kLong, name,
                     "'s indices must be int32 or int64; got ", dtype_of(*index));
    TORCH_CHECK(index->dim() == 1, name, "'s indices must be 1-d; got shape ", index->sizes());
  }
  TORCH_CHECK(crow_indices.numel() > 0, name, "'s row offsets must hold a 0; got none");
  TORCH_CHECK(col_indices.numel() <= std::numeric_limits<int32_t>::max(), name,
              " must have at most 2^31 - 1 stored blocks; got ", col_indices.numel());
}

// Blocks of one matrix, (stored blocks, edge, edge).
inline void check_values(const Tensor& values, int64_t stored, const char* name) {
  check_operand_dtype(values.scalar_type(), name);
  TORCH_CHECK(values.dim() == 3 && values.size(0) == stored && values.size(1) == values.size(2) &&
                  is_block_edge(values.size(1)),
              name, " must hold ", stored, " square blocks of 32, 64 or 128; got shape ",
              values.sizes());
}

inline void check_like(const Tensor& values, const Tensor& values_a, const char* name) {
  TORCH_CHECK_TYPE(values.scalar_type() == values_a.scalar_type(), name,
                   " must have the dtype of a's blocks, ", dtype_of(values_a), "; got ",
                   dtype_of(values));
  TORCH_CHECK(values.size(1) == values_a.size(1), name, " must have a's block edge, ",
              values_a.size(1), "; got ", values.size(1));
}

// Everything but what indices and lists say.
inline void check_arguments(const BsrMultiplyArguments& x) {
  check_indices(x.crow, x.col, "the result");
  check_indices(x.crow_a, x.col_a, "a");
  TORCH_CHECK(x.crow.numel() == x.crow_a.numel(), "the result must have a's ", x.crow_a.numel() - 1,
              " block rows; got ", x.crow.numel() - 1);
  check_values(x.values_a, x.col_a.numel(), "a");
  check_values(x.values_b, x.values_b.size(0), "b");
  check_like(x.values_b, x.values_a, "b");
  const int64_t stored = x.col.numel();
  TORCH_CHECK(x.first.scalar_type() == at::kLong && x.first.dim() == 1 &&
                  x.first.numel() == stored + 1 && x.slots_a.scalar_type() == at::kInt &&
                  x.slots_b.scalar_type() == at::kInt && x.slots_a.dim() == 1 &&
                  x.slots_a.sizes() == x.slots_b.sizes(),
              "a plan must hold int64 places of ", stored,
              " blocks and int32 lists of one length; got shapes ", x.first.sizes(), ", ",
              x.slots_a.sizes(), " and ", x.slots_b.sizes());
  if (!x.adds_input()) return;
  check_indices(*x.crow_input, *x.col_input, "input");
  TORCH_CHECK(x.crow_input->numel() == x.crow.numel(), "input must have ", x.crow.numel() - 1,
              " block rows; got ", x.crow_input->numel() - 1);
  check_values(*x.values_input, x.col_input->numel(), "input");
  check_like(*x.values_input, x.values_a, "input");
}

}  // namespace spamm
