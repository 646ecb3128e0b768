// Patterns of block-sparse matrices and their norm maps on the CPU, checked.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <optional>
#include <tuple>

#include "arguments.h"
#include "block.h"
#include "checks.h"

namespace spamm {

// The argument lists of the ops of block-sparse products; library.cpp has the schemas.

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

using BsrPlan = std::array<Tensor, 5>;  // crow, col, first, slots_a, slots_b
using BsrDrop = std::array<Tensor, 6>;  // crow, col, norms, numbers, bound, sums

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
  check_dtype_of(values, values_a, name, "a's");
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

// Checks what needs no look at the indices.
inline void check_indices(const BsrMaps& x) {
  check_indices(x.crow_a, x.col_a, "a");
  check_indices(x.crow_b, x.col_b, "b");
  check_norm_dtypes(x.norm_a, x.norm_b);
  const auto check_norms = [](const at::Tensor& norms, int64_t stored, const char* name) {
    TORCH_CHECK(norms.dim() == 1 && norms.numel() == stored, name,
                " must have one norm for each of ", stored, " stored blocks; got shape ",
                norms.sizes());
  };
  check_norms(x.norm_a, x.col_a.numel(), "norm_a");
  check_norms(x.norm_b, x.col_b.numel(), "norm_b");
}

inline void check_plan(const BsrPlanArguments& x) {
  check_indices(x);
  check_tau(x.tau, x.norm_a.device());
  const int64_t rows = x.crow_a.numel() - 1;
  TORCH_CHECK(!x.symmetric || rows == x.columns, "a symmetric product must be square; got ", rows,
              " block rows and ", x.columns, " block columns");
  TORCH_CHECK(x.crow_input.has_value() == x.col_input.has_value(),
              "crow_input and col_input must be given together; got one of them");
  if (!x.crow_input) return;
  check_indices(*x.crow_input, *x.col_input, "input");
  TORCH_CHECK(x.crow_input->numel() == rows + 1, "input must have ", rows, " block rows; got ",
              x.crow_input->numel() - 1);
}

inline void check_drop(const BsrDropArguments& x) {
  check_indices(x.crow, x.col, "the result");
  TORCH_CHECK(
      x.share.has_value() == x.norm_a.has_value() && x.share.has_value() == x.norm_b.has_value(),
      "share, norm_a and norm_b must be given together; got some of them");
  const auto check_norms = [&](const at::Tensor& norms, const char* name) {
    TORCH_CHECK_TYPE(norms.scalar_type() == x.norms.scalar_type() &&
                         (norms.scalar_type() == at::kFloat || norms.scalar_type() == at::kDouble),
                     name, " must be float32 or float64, all of one dtype; got ", dtype_of(norms));
  };
  check_norms(x.norms, "norms");
  TORCH_CHECK(x.norms.dim() == 1 && x.norms.numel() == x.col.numel(),
              "norms must have one norm for each of ", x.col.numel(), " stored blocks; got shape ",
              x.norms.sizes());
  for (const at::Tensor* other : {&x.crow, &x.col})
    check_same_device(x.norms, *other, "norms", "the result's indices");
  if (x.values) {
    check_values(*x.values, x.norms.numel(), "values");
    check_dtype_of(*x.values, x.norms, "values", "the norms'");
    check_same_device(x.norms, *x.values, "norms", "the result's blocks");
  }
  if (!x.share) return;
  for (const at::Tensor& other : {*x.norm_a, *x.norm_b}) {
    check_norms(other, "norm_a and norm_b");
    check_same_device(x.norms, other, "norms", "the operands' norms");
  }
}

// Stored block e of row i, for e from crow[i] to crow[i + 1] - 1, is in column col[e].
struct Pattern {
  at::Tensor owner_crow, owner_col;
  const int64_t *crow, *col;
  int64_t rows, columns;

  // Raises unless indices are a matrix's of `columns` block columns, in order. `name`: in messages.
  Pattern(const at::Tensor& crow_indices, const at::Tensor& col_indices, int64_t columns,
          const char* name)
      : columns(columns) {
    check_indices(crow_indices, col_indices, name);
    owner_crow = crow_indices.to(at::kLong).contiguous();
    owner_col = col_indices.to(at::kLong).contiguous();
    crow = owner_crow.const_data_ptr<int64_t>();
    col = owner_col.const_data_ptr<int64_t>();
    rows = owner_crow.numel() - 1;
    TORCH_CHECK(crow[0] == 0 && crow[rows] == stored(), name, "'s row offsets must go from 0 to ",
                stored(), ", its stored blocks; got ", crow[0], " to ", crow[rows]);
    for (int64_t i = 0; i < rows; ++i)
      TORCH_CHECK(crow[i] <= crow[i + 1] && crow[i + 1] <= stored(), name,
                  "'s row offsets must ascend to ", stored(), "; got ", crow[i], " before ",
                  crow[i + 1]);
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t e = crow[i]; e < crow[i + 1]; ++e) {
        TORCH_CHECK(col[e] >= 0 && col[e] < columns, name, "'s block columns must be from 0 to ",
                    columns - 1, "; got ", col[e], " in block row ", i);
        TORCH_CHECK(e == crow[i] || col[e - 1] < col[e], name,
                    "'s block columns must ascend in each block row, each once; got ", col[e - 1],
                    " before ", col[e], " in block row ", i);
      }
  }

  int64_t stored() const { return owner_col.numel(); }

  // The stored block (i, j); -1 if there is none.
  int64_t find(int64_t i, int64_t j) const {
    const int64_t* const end = col + crow[i + 1];
    const int64_t* const found = std::lower_bound(col + crow[i], end, j);
    return found < end && *found == j ? found - col : -1;
  }
};

// The norm maps of a product of block-sparse matrices.
struct CheckedMaps {
  Pattern a, b;
  at::Tensor norm_a, norm_b;  // contiguous

  explicit CheckedMaps(const BsrMaps& x)
      : a(x.crow_a, x.col_a, x.crow_b.numel() - 1, "a"),
        b(x.crow_b, x.col_b, x.columns, "b"),
        norm_a(x.norm_a.contiguous()),
        norm_b(x.norm_b.contiguous()) {
    check_indices(x);
  }
};

// N: type of the norms.
template <class N>
struct CsrMaps {
  const Pattern &a, &b;
  const N *norm_a, *norm_b;

  explicit CsrMaps(const CheckedMaps& maps)
      : a(maps.a),
        b(maps.b),
        norm_a(maps.norm_a.const_data_ptr<N>()),
        norm_b(maps.norm_b.const_data_ptr<N>()) {}

  // Calls visit(stored block of A, stored block of B, column) for the products of block row i, k
  // ascending, from column `first` on.
  template <class Visit>
  void each_product(int64_t i, int64_t first, const Visit& visit) const {
    for (int64_t slot_a = a.crow[i]; slot_a < a.crow[i + 1]; ++slot_a) {
      const int64_t k = a.col[slot_a];
      const int64_t* const end = b.col + b.crow[k + 1];
      const int64_t* column = b.col + b.crow[k];
      if (first > 0) column = std::lower_bound(column, end, first);
      for (; column < end; ++column) visit(slot_a, column - b.col, *column);
    }
  }

  // Calls visit(slot of A, slot of B, column) for the valid products of block row i.
  template <class Visit>
  void each_valid(int64_t i, int64_t first, N tau, const Visit& visit) const {
    each_product(i, first, [&](int64_t slot_a, int64_t slot_b, int64_t j) {
      if (!(norm_a[slot_a] * norm_b[slot_b] < tau)) visit(slot_a, slot_b, j);
    });
  }

  int64_t mean_products() const {  // of a block row
    return a.stored() / std::max<int64_t>(1, a.rows) * (b.stored() / std::max<int64_t>(1, b.rows));
  }
};

}  // namespace spamm
