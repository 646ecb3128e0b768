// The schemas of block-sparse products. Implementations register themselves in cpu/sparse/. Fake
// kernels are in Python.
//
// Ops take plain tensors, because sparse ones do not trace. A matrix of square blocks is crow
// (block rows + 1), col (stored blocks) and values (stored blocks, edge, edge), as torch.sparse_bsr
// has them; its norm map is crow, col and norms (stored blocks). Indices are int32 or int64, the
// columns of a row in ascending order. Only products of two stored blocks exist.
#include <torch/library.h>

TORCH_LIBRARY_FRAGMENT(spamm_torch, m) {
  // The pattern of C (block rows of A x `columns`) and its products. A block is in the pattern
  // where a product is valid, or where `crow_input`, `col_input` have one. symmetric: of the
  // products, only those of blocks on and above the diagonal count, and the pattern below is the
  // mirror image. Returns crow, col and first, int64: the products of block c are number first[c]
  // to first[c + 1]
  // - 1, in the order of k; and for each, with lists, its stored blocks of A and of B, int32.
  m.def(
      "bsr_plan(Tensor crow_a, Tensor col_a, Tensor norm_a, Tensor crow_b, Tensor col_b, Tensor "
      "norm_b, Tensor tau, int columns, *, bool symmetric=False, Tensor? crow_input=None, Tensor? "
      "col_input=None, bool lists=True) -> (Tensor, Tensor, Tensor, Tensor, Tensor)");
  // The blocks of alpha * A @ B + beta * input and their norms, by what bsr_plan returns.
  m.def(
      "bsr_multiply(Tensor crow, Tensor col, Tensor first, Tensor slots_a, Tensor slots_b, Tensor "
      "crow_a, Tensor col_a, Tensor values_a, Tensor values_b, *, Tensor? crow_input=None, Tensor? "
      "col_input=None, Tensor? values_input=None, Scalar beta=1, Scalar alpha=1, bool "
      "symmetric=False) -> (Tensor, Tensor)");
  // As find_tau, find_tau_for_error and error_bound, of the products of stored blocks.
  m.def(
      "bsr_find_tau(Tensor crow_a, Tensor col_a, Tensor norm_a, Tensor crow_b, Tensor col_b, "
      "Tensor norm_b, int columns, float valid_ratio) -> Tensor");
  m.def(
      "bsr_find_tau_for_error(Tensor crow_a, Tensor col_a, Tensor norm_a, Tensor crow_b, Tensor "
      "col_b, Tensor norm_b, int columns, float max_error) -> Tensor");
  m.def(
      "bsr_error_bound(Tensor crow_a, Tensor col_a, Tensor norm_a, Tensor crow_b, Tensor col_b, "
      "Tensor norm_b, int columns, Tensor tau) -> Tensor");
}
