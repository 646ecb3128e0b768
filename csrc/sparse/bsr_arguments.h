// The argument lists of the ops of block-sparse products; library.cpp has the schemas.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <tuple>
#include <utility>

#include "arguments.h"
#include "block.h"
#include "checks.h"

namespace spamm {

struct BsrMaps {
  Tensor crow_a = {}, col_a = {}, norm_a = {}, crow_b = {}, col_b = {}, norm_b = {};
  int64_t columns = 0;  // of B, in blocks

  static auto maps(auto& x) {
    return std::tie(x.crow_a, x.col_a, x.norm_a, x.crow_b, x.col_b, x.norm_b, x.columns);
  }
};

struct BsrPlanArguments : BsrMaps {
  Tensor tau = {};
  bool symmetric = false;
  OptTensor crow_input = {}, col_input = {};
  bool lists = true;
  int64_t block_bytes = 0;
  std::optional<int64_t> free_bytes = {};

  static auto members(auto& x) {
    return std::tuple_cat(maps(x), std::tie(x.tau, x.symmetric, x.crow_input, x.col_input, x.lists,
                                            x.block_bytes, x.free_bytes));
  }

  double needed_bytes(int64_t blocks, int64_t products) const {
    return static_cast<double>(blocks) * static_cast<double>(block_bytes) +
           8.0 * static_cast<double>(products);
  }
};

struct BsrFindTauArguments : BsrMaps {
  std::optional<double> valid_ratio = {}, max_error = {};

  static auto members(auto& x) {
    return std::tuple_cat(maps(x), std::tie(x.valid_ratio, x.max_error));
  }
};

struct BsrErrorBoundArguments : BsrMaps {
  Tensor tau = {};

  static auto members(auto& x) { return std::tuple_cat(maps(x), std::tie(x.tau)); }
};

// The pattern and norms of a result; norm_a and norm_b are the operands', without a pattern.
struct BsrDropArguments {
  Tensor crow = {}, col = {}, norms = {};
  double below = 0;
  std::optional<double> share = {};
  OptTensor norm_a = {}, norm_b = {}, values = {};
  bool symmetric = false;

  static auto members(auto& x) {
    return std::tie(x.crow, x.col, x.norms, x.below, x.share, x.norm_a, x.norm_b, x.values,
                    x.symmetric);
  }
};

// A pattern of so many block columns, of the matrix that messages call `name`.
struct BsrCheckArguments {
  Tensor crow = {}, col = {};
  int64_t columns = 0;
  std::string name = {};

  static auto members(auto& x) { return std::tie(x.crow, x.col, x.columns, x.name); }
};

// Results of ops that return many tensors.
template <size_t size>
struct BsrResults : std::array<Tensor, size> {};
using BsrPlan = BsrResults<5>;  // crow, col, first, slots_a, slots_b
using BsrDrop = BsrResults<6>;  // crow, col, norms, numbers, bound, sums

template <size_t size>
void push_results(Stack& stack, BsrResults<size> results) {
  for (Tensor& result : results) stack.emplace_back(std::move(result));
}

// ---- bsr_multiply -------------------------------------------------------------------------------

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

  // Memory for a result with so many blocks.
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

// Everything but what indices and lists say: no device has to be read for it.
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
