// Every schema of the library; arguments.h has the long ones as structs, and spamm/spamm.h says
// what those do that it calls. Implementations register themselves in cpu/, cuda/ and the
// device-free files. Fake kernels are in Python.

namespace {

using std::string;

// No argument of a whole product or convolution must be given by name: from Python, each name that
// is looked for takes the host as long as a call through the dispatcher.
const string knob =
    "Tensor? tau=None, float? threshold=None, float? valid_ratio=None, float? max_error=None";
const string product =
    "Tensor a, Tensor b, " + knob +
    ", int[3] block=64, Tensor? norm_a=None, Tensor? norm_b=None, Tensor? input=None, "
    "Scalar beta=1, Scalar alpha=1, int[]? devices=None, bool symmetric=False";
const string geometry = "int[2] stride=1, int[2] padding=0, int[2] dilation=1, int groups=1";
const string blocks = "int[3]? block=None, int[3]? pixel_block=None";
const string activation = "str activation=\"none\", float negative_slope=0.01, Tensor? slope=None";
const string epilogue = "Tensor? residual=None, " + activation;
const string convolution = "Tensor input, Tensor weight, Tensor? bias=None, " + geometry + ", " +
                           knob + ", " + blocks +
                           ", Tensor? norm_weight=None, Tensor? norm_input=None, " + epilogue;

}  // namespace

TORCH_LIBRARY(spamm_torch, m) {
  // For products and convolutions. Under torch.compile they keep the strides that eager calls have:
  // kernels read channels-last memory as it lies, and a copy would cost what they save.
  const std::vector<at::Tag> tags = {at::Tag::pt2_compliant_tag, at::Tag::needs_exact_strides};
  const auto define = [&](const string& schema) { m.def(schema.c_str(), tags); };

  // Stages.
  m.def("norm_map(Tensor a, int[2] block) -> Tensor");
  // Both in one launch where the device can. The matrices need not be operands of one product.
  m.def("norm_maps(Tensor a, Tensor b, int[3] block) -> (Tensor, Tensor)");
  // The threshold of a valid ratio or of an error bound; exactly one is given.
  m.def(
      "find_tau(Tensor norm_a, Tensor norm_b, float? valid_ratio=None, *, float? max_error=None, "
      "Tensor? skip_norm_b=None, int max_iterations=20, float tolerance=0.01) -> Tensor");
  m.def("valid_counts(Tensor norm_a, Tensor norm_b, Tensor tau) -> Tensor");
  m.def(
      "error_bound(Tensor norm_a, Tensor norm_b, Tensor tau, *, Tensor? skip_norm_b=None) -> "
      "Tensor");
  m.def(
      "multiply(Tensor a, Tensor b, Tensor norm_a, Tensor norm_b, Tensor tau, int[3] block, *, "
      "Tensor? input=None, Scalar beta=1, Scalar alpha=1, int[2]? whole=None) -> Tensor",
      tags);
  // Writes a @ b to `out`, a part of a product of shape `whole`. own_rows: rows of b from
  // first_own_row on, which need not be in b; where a kernel cannot read them beside the others,
  // they are written to b. No gradient.
  m.def(
      "multiply_part(Tensor a, Tensor(b!) b, Tensor norm_a, Tensor norm_b, Tensor tau, int[3] "
      "block, "
      "Tensor(a!) out, *, int[2] whole, Tensor? own_rows=None, int first_own_row=0) -> ()");
  // The work of each block row, int64 (MB), in thousandths of a valid block product. With parts > 0
  // also parts + 1 block-row numbers, multiples of `multiple` but for the last: cuts by work. They
  // wait for the device.
  m.def(
      "row_work(Tensor norm_a, Tensor norm_b, Tensor tau, int parts=0, int multiple=1) -> (Tensor, "
      "int[])");

  // Pipelines.
  define("spamm(" + product + ") -> Tensor");
  // As spamm, and returns the norm map of the result in blocks (m, n). The norms have no gradient.
  define("spamm_with_norms(" + product + ") -> (Tensor, Tensor)");
  // As spamm, and writes the result to `out`, which has its shape and may share memory with any
  // argument. symmetric: what is written is the upper triangle, diagonal included, and its mirror
  // image. norms, if given, becomes out's norm map in blocks (m, n). No gradient.
  define("spamm_into(" + product + ", *, Tensor(a!) out, Tensor(b!)? norms=None) -> ()");
  // mm_shards.
  define("spamm_shards(Tensor[] a, Tensor[] b, *, " + knob + ", int[3] block=64) -> Tensor[]");
  // threshold: tau as a number that the host knows; no tensor enters a compiled graph. activation.h
  // names the activations; slope, if it is given, takes the place of negative_slope.
  define("conv2d(" + convolution + ") -> Tensor");
  // As conv2d, and returns output norms, which the next layer accepts as norm_input. No gradient.
  define("conv2d_with_norms(" + convolution + ") -> (Tensor, Tensor)");
  define("dense_conv2d(Tensor input, Tensor weight, Tensor? bias=None, " + geometry + ", *, " +
         epilogue + ") -> Tensor");
  // conv2d with nothing skipped, then torch's max pooling of 2 x 2 pixels with stride 2. Of a
  // batch; no gradient.
  define("conv2d_max_pool(Tensor input, Tensor weight, Tensor? bias=None, " + geometry +
         ", *, Tensor? norm_weight=None, " + activation + ") -> Tensor");
  // torch's max pooling of a batch, without indices. No gradient.
  define(
      "max_pool2d(Tensor input, int[2] kernel_size, int[2] stride=[], int[2] padding=0, int[2] "
      "dilation=1, bool ceil_mode=False) -> Tensor");
  // Norms (groups, MB, KB) of conv2d's weight matrix. Modules pin them.
  m.def(
      "conv2d_weight_norm(Tensor weight, int groups=1, *, int[3]? block=None, "
      "int[3]? pixel_block=None) -> Tensor");

  // The name of the kernel that multiplies such matrices; and of conv2d's, by the multiply kernels'
  // names, or "cudnn" or "onednn" where it is torch's convolution.
  m.def("backend_for(Device device, ScalarType dtype, int[3] block) -> str");
  m.def(("conv2d_backend(" + convolution + ") -> str").c_str());

  // Block-sparse products. Ops take plain tensors, because sparse ones do not trace. A matrix of
  // square blocks is crow (block rows + 1), col (stored blocks) and values (stored blocks, edge,
  // edge), as torch.sparse_bsr has them; its norm map is crow, col and norms (stored blocks).
  // Indices are int32 or int64, the columns of a row in ascending order. Only products of two
  // stored blocks exist.
  // Raises unless indices are such a pattern, of so many block columns. On CUDA the host waits for
  // them. `name`: of the matrix, for the message.
  m.def("bsr_check(Tensor crow, Tensor col, int columns, str name) -> ()");
  const string maps =
      "(Tensor crow_a, Tensor col_a, Tensor norm_a, Tensor crow_b, Tensor col_b, Tensor norm_b, "
      "int columns, ";
  const auto define_sparse = [&](const string& name, const string& rest) {
    m.def((name + maps + rest).c_str());
  };
  // The pattern of C (block rows of A x `columns`) and its products. A block is in the pattern
  // where a product is valid, or where `crow_input`, `col_input` have one. symmetric: of the
  // products, only those of blocks on and above the diagonal count, and the pattern below is the
  // mirror image. Returns crow, col and first, int64: the products of block c are number first[c]
  // to first[c + 1] - 1, in the order of k; and for each, with lists, its stored blocks of A and of
  // B, int32. Lists stay empty where they and `block_bytes` a block of C exceed `free_bytes`, on
  // CUDA by default what the device has. CUDA: waits once.
  define_sparse(
      "bsr_plan",
      "Tensor tau, *, bool symmetric=False, Tensor? crow_input=None, Tensor? col_input=None, "
      "bool lists=True, int block_bytes=0, int? free_bytes=None) -> (Tensor, Tensor, Tensor, "
      "Tensor, Tensor)");
  // The blocks of alpha * A @ B + beta * input and, with norms, their norms, else (0,), by what
  // bsr_plan returns. On CUDA nothing waits for the host: indices and lists are not checked there.
  // Blocks of 32 then need B's pattern. float32's rounding depends on tau (0 if absent).
  m.def(
      "bsr_multiply(Tensor crow, Tensor col, Tensor first, Tensor slots_a, Tensor slots_b, Tensor "
      "crow_a, Tensor col_a, Tensor values_a, Tensor values_b, *, Tensor? crow_b=None, Tensor? "
      "col_b=None, Tensor? tau=None, Tensor? crow_input=None, Tensor? col_input=None, Tensor? "
      "values_input=None, Scalar beta=1, Scalar alpha=1, bool symmetric=False, bool norms=True) -> "
      "(Tensor, Tensor)");
  // Finds the blocks that stay of a result with these norms. Those below `below` go, with `share`
  // only the smallest, as long as their common norm is at most share * norm(A) * norm(B), from the
  // norms of the operands' blocks. symmetric: a block below the diagonal goes with its mirror
  // image. Blocks with NaN or infinity stay. Returns the pattern, int64, and the norms of those
  // that stay, their numbers among all, and a bound of the norm of the others; with the result's
  // blocks, `values`, of the norms' dtype, also the trace and the norm of what stays, float64 (2,)
  // on the CPU, else (0,). CUDA: waits once, does not check.
  m.def(
      "bsr_drop(Tensor crow, Tensor col, Tensor norms, *, float below, float? share=None, Tensor? "
      "norm_a=None, Tensor? norm_b=None, Tensor? values=None, bool symmetric=False) -> (Tensor, "
      "Tensor, Tensor, Tensor, Tensor, Tensor)");
  // As find_tau and error_bound, of the products of stored blocks. The latter also returns how many
  // of these are valid, and how many there are, int64 (2,). CUDA: nothing waits, and a pattern that
  // is not in order gives NaN.
  define_sparse("bsr_find_tau", "*, float? valid_ratio=None, float? max_error=None) -> Tensor");
  define_sparse("bsr_error_bound", "Tensor tau) -> (Tensor, Tensor)");
}

// ---- A build without CUDA -----------------------------------------------------------------------

#ifndef SPAMM_WITH_CUDA
namespace {

// Every stage refuses CUDA tensors with a one-line error.
void no_cuda(const c10::OperatorHandle& op, torch::jit::Stack*) {
  TORCH_CHECK(
      false, op.schema().name(),
      ": this build of spamm_torch is for the CPU only; build it again where nvcc is found; "
      "got a CUDA tensor");
}

}  // namespace

TORCH_LIBRARY_IMPL(spamm_torch, CUDA, m) {
  for (const char* name : {"norm_map", "norm_maps", "find_tau", "valid_counts", "error_bound",
                           "spamm", "spamm_with_norms", "spamm_into", "multiply", "multiply_part",
                           "bsr_plan", "bsr_find_tau", "bsr_error_bound"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&no_cuda>());
  }
}
#endif
