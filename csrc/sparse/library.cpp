// The schemas of block-sparse products. Implementations register themselves in cpu/sparse/. Fake
// kernels are in Python.
//
// Ops take plain tensors, because sparse ones do not trace. A matrix of square blocks is crow
// (block rows + 1), col (stored blocks) and values (stored blocks, edge, edge), as torch.sparse_bsr
// has them; its norm map is crow, col and norms (stored blocks). Indices are int32 or int64, the
// columns of a row in ascending order. Only products of two stored blocks exist.
#include <torch/library.h>

#include <string>

TORCH_LIBRARY_FRAGMENT(spamm_torch, m) {
  const std::string maps =
      "(Tensor crow_a, Tensor col_a, Tensor norm_a, Tensor crow_b, Tensor col_b, Tensor norm_b, "
      "int columns, ";
  const auto define = [&](const std::string& name, const std::string& rest) {
    m.def((name + maps + rest).c_str());
  };
  // The pattern of C (block rows of A x `columns`) and its products. A block is in the pattern
  // where a product is valid, or where `crow_input`, `col_input` have one. symmetric: of the
  // products, only those of blocks on and above the diagonal count, and the pattern below is the
  // mirror image. Returns crow, col and first, int64: the products of block c are number first[c]
  // to first[c + 1]
  // - 1, in the order of k; and for each, with lists, its stored blocks of A and of B, int32. Lists
  // stay empty where they and `block_bytes` a block of C exceed `free_bytes`, on CUDA by default
  // what the device has. CUDA: waits once.
  define("bsr_plan",
         "Tensor tau, *, bool symmetric=False, Tensor? crow_input=None, Tensor? col_input=None, "
         "bool lists=True, int block_bytes=0, int? free_bytes=None) -> (Tensor, Tensor, Tensor, "
         "Tensor, Tensor)");
  // The blocks of alpha * A @ B + beta * input and, with norms, their norms, else (0,), by what
  // bsr_plan returns. On CUDA nothing waits for the host: indices and lists are not checked there.
  // Blocks of 32 then need B's pattern, and float32's rounding depends on tau (0 if it is absent),
  // as in dense storage.
  m.def(
      "bsr_multiply(Tensor crow, Tensor col, Tensor first, Tensor slots_a, Tensor slots_b, Tensor "
      "crow_a, Tensor col_a, Tensor values_a, Tensor values_b, *, Tensor? crow_b=None, Tensor? "
      "col_b=None, Tensor? tau=None, Tensor? crow_input=None, Tensor? col_input=None, Tensor? "
      "values_input=None, Scalar beta=1, Scalar alpha=1, bool symmetric=False, bool norms=True) -> "
      "(Tensor, Tensor)");
  // Which blocks stay of a result with these norms. Those below `below` go, with `share` only the
  // smallest, as long as their common norm is at most share * norm(A) * norm(B), from the norms of
  // the operands' blocks. symmetric: a block below the diagonal goes with its mirror image. Blocks
  // with NaN or infinity stay. Returns the pattern, int64, and the norms of those that stay, their
  // numbers among all, and a bound of the norm of the others; with the result's blocks, `values`,
  // of the norms' dtype, also the trace and the norm of what stays, float64 (2,) on the CPU, else
  // (0,). CUDA: waits once, does not check.
  m.def(
      "bsr_drop(Tensor crow, Tensor col, Tensor norms, *, float below, float? share=None, Tensor? "
      "norm_a=None, Tensor? norm_b=None, Tensor? values=None, bool symmetric=False) -> (Tensor, "
      "Tensor, Tensor, Tensor, Tensor, Tensor)");
  // As find_tau and error_bound, of the products of stored blocks. The latter also returns how many
  // of these are valid, and how many there are, int64 (2,). CUDA: nothing waits, and a pattern that
  // is not in order gives NaN.
  define("bsr_find_tau", "*, float? valid_ratio=None, float? max_error=None) -> Tensor");
  define("bsr_error_bound", "Tensor tau) -> (Tensor, Tensor)");
}
