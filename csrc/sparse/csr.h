// Patterns of block-sparse matrices and their norm maps on the CPU, checked.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>

#include "checks.h"
#include "sparse/bsr_arguments.h"

namespace spamm {

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
    TORCH_CHECK_TYPE(x.values->scalar_type() == x.norms.scalar_type(),
                     "values must have the dtype of norms, ", dtype_of(x.norms), "; got ",
                     dtype_of(*x.values));
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

  // Raises unless the indices are those of a matrix of `columns` block columns, in order. `name` is
  // the matrix in messages.
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
